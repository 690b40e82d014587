"""The scheduler's messages into values and back. A message never travels deeper than this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import from_status
from blockyard.scheduler.v1 import scheduler_pb2
from gateway.attachment import (
    Abort,
    AbortReason,
    Acceptance,
    Ending,
    Failure,
    ModelFacts,
    Prefill,
    Progress,
    Readiness,
    Recovery,
)
from gateway.request import FinishReason

if TYPE_CHECKING:
    from gateway.attachment import Submission
    from gateway.request import SamplingOptions

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_ABORT_REASONS = {
    AbortReason.CLIENT: scheduler_pb2.ABORT_REASON_CLIENT,
    AbortReason.STOP_STRING: scheduler_pb2.ABORT_REASON_STOP_STRING,
}
_SAMPLING_NUMBERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "logprobs",
    "prompt_logprobs",
)


def encode_submission(submission: Submission) -> scheduler_pb2.AddRequest:
    """Writes a request for the scheduler."""
    return scheduler_pb2.AddRequest(
        request_id=submission.request_id,
        prompt_token_ids=submission.prompt_token_ids,
        n=submission.n,
        sampling=encode_sampling(submission.sampling),
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        stop_token_ids=submission.stop_token_ids,
    )


def encode_sampling(options: SamplingOptions) -> sampling_pb2.SamplingParams:
    """Writes sampling parameters. Bad words must be token sequences by now."""
    return sampling_pb2.SamplingParams(
        **{name: getattr(options, name) for name in _SAMPLING_NUMBERS},
        logit_bias=options.logit_bias,
        allowed_token_ids=options.allowed_token_ids,
        bad_token_sequences=[
            sampling_pb2.TokenSequence(token_ids=token_ids) for token_ids in options.bad_token_sequences
        ],
    )


def encode_abort(abort: Abort) -> scheduler_pb2.AbortRequest:
    """Writes an abort for the scheduler."""
    return scheduler_pb2.AbortRequest(
        request_id=abort.request_id,
        sequence_index=abort.sequence_index,
        reason=_ABORT_REASONS[abort.reason],
        num_tokens=abort.num_tokens,
    )


def decode_progress(message: scheduler_pb2.AttachResponse) -> Progress:
    """Reads one message of the scheduler. Slices copy packed columns at once."""
    return Progress(
        accepted=[Acceptance(item.request_id, item.first_sequence_id) for item in message.accepted],
        failed=[Failure(item.request_id, from_status(item.status)) for item in message.failed],
        prefilled=list(map(Prefill, message.prefilled_sequence_ids, message.num_cached_tokens)),
        sequence_ids=message.sequence_ids[:],
        token_ids=message.token_ids[:],
        ended=[
            Ending(sequence_id, _REASONS.get(reason, FinishReason.ERROR))
            for sequence_id, reason in zip(message.finished_sequence_ids, message.finish_reasons, strict=True)
        ],
        recovered=tuple(
            Recovery(item.request_id, item.cause, item.num_replayed_tokens, item.exact) for item in message.recovered
        ),
        facts=_decode_facts(message.facts) if message.HasField("facts") else None,
        readiness=(
            Readiness(message.readiness.ready, message.readiness.message) if message.HasField("readiness") else None
        ),
    )


def _decode_facts(message: scheduler_pb2.ModelFacts) -> ModelFacts:
    return ModelFacts(
        model_digest=message.model_digest,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        block_size=message.block_size,
        determinism_id=message.determinism_id,
        batch_invariant=message.batch_invariant,
    )
