"""Encodes and decodes what a gateway sends to the scheduler."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from blockyard.common.v1 import pooling_pb2, sampling_pb2
from blockyard.contract.codec.messages import EnumCodec, decode_seconds, encode_seconds
from blockyard.contract.codec.pooling import (
    decode_pooling,
    encode_pooling,
)
from blockyard.contract.codec.sampling import (
    decode_beams,
    decode_prediction,
    decode_reason,
    decode_sampling,
    encode_beams,
    encode_prediction,
    encode_reason,
    encode_sampling,
    join_logprobs,
    split_logprobs,
)
from blockyard.contract.codec.trace import decode_trace_context, encode_trace_context
from blockyard.contract.scheduling import (
    Abort,
    AbortReason,
    Adapter,
    Resubmission,
    SequenceError,
    SequenceRecord,
    Submission,
)
from blockyard.errors import BlockyardError, Reason, from_status, to_status
from blockyard.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from blockyard.contract.scheduling import Add, Resume
    from blockyard.google_rpc import status_pb2

_ABORT_REASONS = EnumCodec(AbortReason, scheduler_pb2.AbortReason.items(), "ABORT_REASON_", zero=AbortReason.CLIENT)


# Requests.


def encode_submission(submission: Submission) -> bytes:
    """Encodes a request as the bytes that the scheduler keeps."""
    return scheduler_pb2.Submission(
        request_id=submission.request_id,
        # A list is read in half the time that an array takes.
        prompt_token_ids=list(submission.prompt_token_ids),
        n=submission.n,
        sampling=encode_sampling(submission.sampling).SerializeToString(),
        max_tokens=submission.max_tokens,
        min_tokens=submission.min_tokens,
        stop_token_ids=submission.stop_token_ids,
        tenant=submission.tenant,
        digest=submission.digest,
        gateway_state=submission.gateway_state,
        priority=submission.priority,
        max_queue_time=encode_seconds(submission.max_queue_seconds),
        remaining_time=encode_seconds(submission.remaining_seconds),
        beam_search=encode_beams(submission.beam_search) if submission.beam_search else None,
        trace_context=encode_trace_context(submission.trace_context) if submission.trace_context else None,
        pooling=encode_pooling(submission.pooling).SerializeToString() if submission.pooling else b"",
        computes_whole_prompt=submission.computes_whole_prompt,
        lora=encode_adapter(submission.lora) if submission.lora else None,
        fails_on_update=submission.fails_on_update,
        cache_salt=submission.cache_salt,
    ).SerializeToString()


def decode_submission(encoded: bytes) -> Submission:
    """Decodes a request that some gateway sent. Raises google.protobuf.message.DecodeError."""
    message = scheduler_pb2.Submission.FromString(encoded)
    return Submission(
        request_id=message.request_id,
        prompt_token_ids=array("I", message.prompt_token_ids[:]),
        n=message.n,
        sampling=decode_sampling(sampling_pb2.SamplingParams.FromString(message.sampling)),
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids[:]),
        tenant=message.tenant,
        digest=message.digest,
        gateway_state=message.gateway_state,
        priority=message.priority,
        max_queue_seconds=decode_seconds(message, "max_queue_time"),
        remaining_seconds=decode_seconds(message, "remaining_time"),
        beam_search=decode_beams(message.beam_search) if message.HasField("beam_search") else None,
        trace_context=decode_trace_context(message.trace_context) if message.HasField("trace_context") else None,
        pooling=decode_pooling(pooling_pb2.Pooling.FromString(message.pooling)) if message.pooling else None,
        lora=decode_adapter(message.lora) if message.HasField("lora") else None,
        fails_on_update=message.fails_on_update,
        cache_salt=message.cache_salt,
    )


def encode_add(add: Add) -> scheduler_pb2.AddRequest:
    """Encodes a request to add, with the record of one that had run before."""
    return scheduler_pb2.AddRequest(
        handle=add.handle,
        submission=encode_submission(add.submission),
        resubmission=_encode_resubmission(add.resubmission) if add.resubmission else None,
        age=encode_seconds(add.age_seconds),
    )


def _encode_resubmission(resubmission: Resubmission) -> scheduler_pb2.Resubmission:
    return scheduler_pb2.Resubmission(
        age=encode_seconds(resubmission.age_seconds),
        sequences=map(encode_record, resubmission.sequences),
        num_cached_tokens=resubmission.num_cached_tokens,
    )


def decode_resubmission(message: scheduler_pb2.Resubmission) -> Resubmission:
    """Decodes the record of a request that had run before. No age is below 0."""
    return Resubmission(
        age_seconds=max(message.age.ToNanoseconds() / 1e9, 0.0),
        sequences=list(map(decode_record, message.sequences)),
        num_cached_tokens=message.num_cached_tokens,
    )


def encode_record(record: SequenceRecord) -> scheduler_pb2.SequenceTranscript:
    return scheduler_pb2.SequenceTranscript(
        token_ids=record.token_ids,
        finish_reason=encode_reason(record.reason),
        logprobs=join_logprobs(record.logprobs) if record.logprobs else None,
        score=record.score,
        error=encode_error(record.error) if record.error else None,
        pooled_values=record.pooled_values,
        prediction=None if record.prediction is None else encode_prediction(record.prediction),
    )


def decode_record(message: scheduler_pb2.SequenceTranscript) -> SequenceRecord:
    return SequenceRecord(
        token_ids=message.token_ids[:],
        reason=decode_reason(message.finish_reason),
        logprobs=split_logprobs(message.logprobs),
        score=message.score if message.HasField("score") else None,
        error=decode_error(message.error) if message.HasField("error") else None,
        pooled_values=message.pooled_values,
        prediction=decode_prediction(message.prediction) if message.HasField("prediction") else None,
    )


def encode_error(error: SequenceError) -> status_pb2.Status:
    return to_status(BlockyardError(Reason(error.reason), error.message))


def decode_error(status: status_pb2.Status) -> SequenceError:
    """Decodes why a sequence failed; a reason of a later version becomes the one that its code suggests."""
    error = from_status(status)
    return SequenceError(str(error.reason), error.message)


def encode_resume(resume: Resume) -> scheduler_pb2.ResumeRequest:
    return scheduler_pb2.ResumeRequest(request_id=resume.request_id, handle=resume.handle)


def encode_abort(abort: Abort) -> scheduler_pb2.AbortRequest:
    return scheduler_pb2.AbortRequest(
        request_id=abort.request_id,
        sequence_index=abort.sequence_index,
        reason=_ABORT_REASONS.encode(abort.reason),
        num_tokens=abort.num_tokens,
        handle=abort.handle,
    )


def decode_abort(message: scheduler_pb2.AbortRequest) -> Abort:
    """Decodes what to end; a reason of a later version is CLIENT."""
    return Abort(
        message.handle,
        message.request_id,
        _ABORT_REASONS.decode(message.reason),
        message.sequence_index if message.HasField("sequence_index") else None,
        message.num_tokens,
    )


def encode_adapter(adapter: Adapter) -> scheduler_pb2.LoraAdapter:
    return scheduler_pb2.LoraAdapter(
        lora_id=adapter.lora_id,
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        pinned=adapter.pinned,
        num_virtual_tokens=adapter.num_virtual_tokens,
    )


def decode_adapter(message: scheduler_pb2.LoraAdapter) -> Adapter:
    return Adapter(
        message.lora_id,
        message.name,
        message.path,
        message.digest,
        pinned=message.pinned,
        num_virtual_tokens=message.num_virtual_tokens,
    )
