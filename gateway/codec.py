"""Messages into values and back, on both sides of the gateway. A message never travels deeper than this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import from_status
from blockyard.inference.v1 import inference_pb2
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
from gateway.request import (
    Accepted,
    Delta,
    Finished,
    FinishReason,
    GenerationRequest,
    Recovered,
    SamplingOptions,
    StopOptions,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.attachment import Submission
    from gateway.generation import ModelCard
    from gateway.request import Event

_REASONS = {
    sampling_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    sampling_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    sampling_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_REASON_NUMBERS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: sampling_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: sampling_pb2.FINISH_REASON_ERROR,
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
)


# The public side.


def decode_spec(spec: inference_pb2.GenerationSpec) -> GenerationRequest:
    """Reads a request; a prompt that is absent becomes an empty text."""
    prompt = tuple(spec.token_ids.ids[:]) if spec.WhichOneof("prompt") == "token_ids" else spec.text
    return GenerationRequest(
        prompt=prompt,
        request_id=spec.request_id,
        model=spec.model,
        sampling=_decode_sampling(spec.sampling),
        stop=_decode_stop(spec.stop),
        n=spec.n if spec.HasField("n") else 1,
        return_token_ids=spec.return_token_ids,
        skip_special_tokens=spec.skip_special_tokens if spec.HasField("skip_special_tokens") else True,
    )


def _decode_sampling(message: sampling_pb2.SamplingParams) -> SamplingOptions:
    given = {name: getattr(message, name) for name in _SAMPLING_NUMBERS if message.HasField(name)}
    return SamplingOptions(**given, logit_bias=dict(message.logit_bias))


def _decode_stop(message: sampling_pb2.StopCriteria) -> StopOptions:
    return StopOptions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens if message.HasField("min_tokens") else None,
        stop_strings=tuple(message.stop_strings),
        stop_token_ids=tuple(message.stop_token_ids[:]),
        ignore_eos=message.ignore_eos,
        include_stop_in_output=message.include_stop_in_output,
    )


def encode_event(event: Event, seq: int) -> inference_pb2.StreamGenerateResponse:
    """Writes one event of a stream."""
    if isinstance(event, Delta):
        message = inference_pb2.GenerationEvent(seq=seq, delta=_encode_delta(event))
    elif isinstance(event, Accepted):
        message = inference_pb2.GenerationEvent(seq=seq, accepted=encode_accepted(event))
    elif isinstance(event, Recovered):
        message = inference_pb2.GenerationEvent(seq=seq, recovered=_encode_recovered(event))
    else:
        message = inference_pb2.GenerationEvent(seq=seq, finished=_encode_finished(event))
    return inference_pb2.StreamGenerateResponse(event=message)


def encode_accepted(event: Accepted) -> inference_pb2.Accepted:
    """Writes that a request is queued."""
    return inference_pb2.Accepted(
        request_id=event.request_id, num_prompt_tokens=event.num_prompt_tokens, seed=event.seed, model=event.model
    )


def _encode_delta(event: Delta) -> inference_pb2.Delta:
    return inference_pb2.Delta(
        index=event.index,
        text=event.text,
        token_ids=event.token_ids,
        num_tokens=event.num_tokens,
        num_text_bytes=event.num_text_bytes,
    )


def _encode_recovered(event: Recovered) -> inference_pb2.Recovered:
    return inference_pb2.Recovered(cause=event.cause, num_replayed_tokens=event.num_replayed_tokens, exact=event.exact)


def _encode_finished(event: Finished) -> inference_pb2.Finished:
    matched = None
    if isinstance(event.matched, str):
        matched = inference_pb2.MatchedStop(stop_string=event.matched)
    elif event.matched is not None:
        matched = inference_pb2.MatchedStop(stop_token_id=event.matched)
    return inference_pb2.Finished(
        index=event.index,
        reason=_REASON_NUMBERS[event.reason],
        matched_stop=matched,
        usage=sampling_pb2.Usage(
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
            num_completion_tokens=event.num_completion_tokens,
        ),
        determinism_id=event.determinism_id,
    )


def encode_choice(deltas: Sequence[Delta], finished: Finished) -> inference_pb2.Choice:
    """Writes a whole sequence."""
    return inference_pb2.Choice(
        index=finished.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finished=_encode_finished(finished),
    )


def encode_model(card: ModelCard) -> inference_pb2.Model:
    """Writes a model."""
    return inference_pb2.Model(
        name=card.name,
        max_model_len=card.max_model_len,
        vocab_size=card.vocab_size,
        has_chat_template=card.has_chat_template,
        determinism_id=card.determinism_id,
        batch_invariant=card.batch_invariant,
    )


# The scheduler's side.


def encode_submission(submission: Submission) -> scheduler_pb2.AddRequest:
    """Writes a request for the scheduler."""
    given = {name: getattr(submission.sampling, name) for name in _SAMPLING_NUMBERS}
    return scheduler_pb2.AddRequest(
        request_id=submission.request_id,
        prompt_token_ids=submission.prompt_token_ids,
        n=submission.n,
        sampling=sampling_pb2.SamplingParams(**given, logit_bias=submission.sampling.logit_bias),
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        stop_token_ids=submission.stop_token_ids,
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
