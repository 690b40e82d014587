"""Decodes and encodes the scheduler's messages. A message never travels deeper than this module."""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Literal

from google.protobuf import duration_pb2

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.errors import from_status, to_status
from blockyard.logprob_columns import join_logprobs, split_logprobs
from blockyard.pooling.columns import split_values
from blockyard.pooling.tasks import find_task
from blockyard.scheduler.v1 import scheduler_pb2
from blockyard.tracing.codec import decode_trace_context, encode_trace_context
from gateway.codec.sampling import (
    decode_beams,
    decode_reason,
    decode_sampling,
    encode_beams,
    encode_reason,
    encode_sampling,
)
from gateway.scheduler_messages import (
    Abort,
    Acceptance,
    Adapter,
    Ending,
    Failure,
    ModelFacts,
    Pooling,
    PoolingKind,
    Prefill,
    Progress,
    PromptPiece,
    Readiness,
    Recovery,
    ReplicaReading,
    Resumed,
    SchedulerReading,
    SequenceRecord,
    Submission,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blockyard.common.v1 import status_pb2
    from gateway.scheduler_messages import Add, Resubmission, Resume


def encode_submission(submission: Submission) -> scheduler_pb2.AddRequest:
    """Writes a request for the scheduler."""
    return scheduler_pb2.AddRequest(
        request_id=submission.request_id,
        # A list is read in half the time that an array takes.
        prompt_token_ids=list(submission.prompt_token_ids),
        n=submission.n,
        sampling=encode_sampling(submission.sampling),
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        stop_token_ids=submission.stop_token_ids,
        tenant=submission.tenant,
        priority=submission.priority,
        max_queue_time=_encode_duration(submission.max_queue_seconds),
        remaining_time=_encode_duration(submission.remaining_seconds),
        beam_search=encode_beams(submission.beam_search) if submission.beam_search else None,
        gateway_state=submission.gateway_state,
        body_digest=submission.body_digest,
        trace_context=encode_trace_context(submission.trace_context),
        lora=encode_lora(submission.lora) if submission.lora else None,
        fails_on_update=submission.fails_on_update,
        pooling=_encode_pooling(submission.pooling) if submission.pooling else None,
    )


def decode_submission(message: scheduler_pb2.AddRequest) -> Submission:
    """Reads a request that some gateway sent to the scheduler."""
    return Submission(
        request_id=message.request_id,
        prompt_token_ids=array("I", message.prompt_token_ids[:]),
        n=message.n,
        sampling=decode_sampling(message.sampling),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids[:]),
        tenant=message.tenant,
        priority=message.priority,
        max_queue_seconds=_decode_duration(message, "max_queue_time"),
        remaining_seconds=_decode_duration(message, "remaining_time"),
        beam_search=decode_beams(message.beam_search) if message.HasField("beam_search") else None,
        gateway_state=message.gateway_state,
        body_digest=message.body_digest,
        trace_context=decode_trace_context(message.trace_context),
        lora=_decode_lora(message.lora) if message.HasField("lora") else None,
        fails_on_update=message.fails_on_update,
        pooling=_decode_pooling(message.pooling) if message.HasField("pooling") else None,
    )


def _encode_pooling(pooling: Pooling) -> pooling_pb2.Pooling:
    return pooling_pb2.Pooling(
        kind=pooling_pb2.PoolingKind.ValueType(pooling.kind),
        label_token_ids=pooling.label_token_ids,
        normalise=pooling.normalise,
        dimensions=pooling.dimensions,
        leaves_raw=pooling.leaves_raw,
        second_from=pooling.second_from,
    )


def _decode_pooling(message: pooling_pb2.Pooling) -> Pooling:
    return Pooling(
        kind=PoolingKind(message.kind),
        label_token_ids=tuple(message.label_token_ids[:]),
        normalise=message.normalise,
        dimensions=message.dimensions,
        leaves_raw=message.leaves_raw,
        second_from=message.second_from,
    )


def encode_lora(adapter: Adapter) -> scheduler_pb2.LoraAdapter:
    """Writes an adapter as the scheduler said it."""
    return scheduler_pb2.LoraAdapter(**adapter._asdict())


def _decode_lora(message: scheduler_pb2.LoraAdapter) -> Adapter:
    num_virtual_tokens = message.num_virtual_tokens
    return Adapter(message.lora_id, message.name, message.path, message.digest, message.pinned, num_virtual_tokens)


def encode_add(add: Add) -> scheduler_pb2.AddRequest:
    """Writes a request for the scheduler, with the record of a request that had run before."""
    message = encode_submission(add.submission)
    message.handle = add.handle
    if add.age_seconds is not None:
        message.age.FromNanoseconds(round(add.age_seconds * 1e9))
    if add.resubmission is not None:
        message.resubmission.CopyFrom(_encode_resubmission(add.resubmission))
    return message


def _encode_resubmission(resubmission: Resubmission) -> scheduler_pb2.Resubmission:
    return scheduler_pb2.Resubmission(
        age=_encode_duration(resubmission.age_seconds),
        sequences=map(_encode_record, resubmission.sequences),
        num_cached_tokens=resubmission.num_cached_tokens,
    )


def _encode_record(record: SequenceRecord) -> scheduler_pb2.SequenceTranscript:
    return scheduler_pb2.SequenceTranscript(
        token_ids=record.token_ids,
        finish_reason=encode_reason(record.reason) if record.reason else sampling_pb2.FINISH_REASON_UNSPECIFIED,
        logprobs=join_logprobs(record.logprobs) if record.logprobs else None,
        score=record.score,
        error=to_status(record.error) if record.error else None,
        pooled_values=record.pooled_values,
    )


def _decode_record(message: scheduler_pb2.SequenceTranscript) -> SequenceRecord:
    return SequenceRecord(
        token_ids=message.token_ids[:],
        reason=decode_reason(message.finish_reason) if message.finish_reason else None,
        logprobs=split_logprobs(message.logprobs),
        score=message.score if message.HasField("score") else None,
        error=from_status(message.error) if message.HasField("error") else None,
        pooled_values=message.pooled_values,
    )


def encode_resume(resume: Resume) -> scheduler_pb2.ResumeRequest:
    """Writes a look-up of a request."""
    return scheduler_pb2.ResumeRequest(request_id=resume.request_id, handle=resume.handle)


def _decode_resumed(message: scheduler_pb2.RequestResumed) -> Resumed:
    return Resumed(
        handle=message.handle,
        submission=decode_submission(message.request),
        first_sequence_id=message.first_sequence_id,
        sequences=list(map(_decode_record, message.sequences)),
        num_cached_tokens=message.num_cached_tokens,
        prompt_logprobs=decode_prompt_logprobs(message.prompt_logprobs),
    )


def _encode_duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _decode_duration(
    message: scheduler_pb2.AddRequest, field: Literal["max_queue_time", "remaining_time"]
) -> float | None:
    return getattr(message, field).ToNanoseconds() / 1e9 if message.HasField(field) else None


def decode_prompt_logprobs(messages: Iterable[sampling_pb2.PromptLogprobs]) -> list[PromptPiece]:
    """Reads log probabilities of pieces of prompts."""
    return [
        PromptPiece(message.sequence_id, message.first_position, split_logprobs(message.logprobs))
        for message in messages
    ]


def encode_abort(abort: Abort) -> scheduler_pb2.AbortRequest:
    """Writes an abort for the scheduler."""
    return scheduler_pb2.AbortRequest(
        request_id=abort.request_id,
        sequence_index=abort.sequence_index,
        reason=scheduler_pb2.AbortReason.ValueType(abort.reason),
        num_tokens=abort.num_tokens,
        handle=abort.handle,
    )


def decode_progress(message: scheduler_pb2.AttachResponse) -> Progress:
    """Reads one message of the scheduler. Slices copy packed columns at once."""
    sequence_ids, token_ids = message.sequence_ids[:], message.token_ids[:]
    if len(message.ListFields()) == bool(sequence_ids) + bool(token_ids):
        # Tokens and nothing else, as of most steps: to look at each of the other fields costs more than to read these.
        return Progress([], [], [], sequence_ids, token_ids, [])
    return Progress(
        accepted=[Acceptance(item.handle, item.first_sequence_id) for item in message.accepted],
        failed=[Failure(item.handle, from_status(item.status)) for item in message.failed],
        prefilled=list(map(Prefill, message.prefilled_sequence_ids, message.num_cached_tokens)),
        sequence_ids=sequence_ids,
        token_ids=token_ids,
        ended=_decode_endings(message),
        recovered=tuple(
            Recovery(item.request_id, item.cause, item.num_replayed_tokens, item.exact) for item in message.recovered
        ),
        weights=tuple((item.request_id, item.version) for item in message.weights),
        facts=_decode_facts(message.facts) if message.HasField("facts") else None,
        readiness=(
            Readiness(message.readiness.ready, message.readiness.message) if message.HasField("readiness") else None
        ),
        logprobs=list(zip(message.logprob_sequence_ids, split_logprobs(message.logprobs), strict=True)),
        prompt_logprobs=decode_prompt_logprobs(message.prompt_logprobs),
        resumed=list(map(_decode_resumed, message.resumed)),
        loras=tuple(map(_decode_lora, message.loras.adapters)) if message.HasField("loras") else None,
        pooled=list(
            zip(message.pooled_sequence_ids, split_values(message.pooled_sizes, message.pooled_values), strict=True)
        ),
    )


def _decode_endings(message: scheduler_pb2.AttachResponse) -> list[Ending]:
    scores: Sequence[float | None] = message.finish_scores or [None] * len(message.finish_reasons)
    errors = {failure.sequence_id: from_status(failure.status) for failure in message.sequence_failures}
    return [
        Ending(
            sequence_id,
            decode_reason(reason),
            None if score is None or math.isnan(score) else score,
            errors.get(sequence_id),
        )
        for sequence_id, reason, score in zip(
            message.finished_sequence_ids, message.finish_reasons, scores, strict=True
        )
    ]


def _decode_facts(message: scheduler_pb2.ModelFacts) -> ModelFacts:
    return ModelFacts(
        model_digest=message.model_digest,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        block_size=message.block_size,
        determinism_id=message.determinism_id,
        batch_invariant=message.batch_invariant,
        max_num_seqs=message.max_num_seqs,
        weights_version=message.weights_version,
        task=find_task(message.task),
        max_prompt_len=message.max_prompt_len,
        warnings=tuple(message.warnings),
    )


def decode_reading(message: status_pb2.SchedulerStatus) -> SchedulerReading:
    """Reads the scheduler's load for the metrics."""
    # It counts what waits at replicas too, most of which was preempted.
    num_waiting = message.num_waiting_requests - sum(each.num_waiting_sequences for each in message.replicas)
    return SchedulerReading(
        num_waiting_requests=max(0, num_waiting),
        num_running_requests=max(0, message.num_requests - max(0, num_waiting)),
        replicas=tuple(
            ReplicaReading(
                each.replica_id,
                _used_share(each.device_blocks),
                each.num_queried_tokens,
                each.num_cached_tokens,
                each.num_preemptions,
            )
            for each in message.replicas
            # Before its pools exist there are no numbers.
            if each.device_blocks.num_blocks
        ),
    )


def _used_share(pool: status_pb2.BlockPoolStatus) -> float:
    return (pool.num_blocks - pool.num_free_blocks) / pool.num_blocks
