"""Decodes the gateways' messages into values (`messages`) and encodes values for them.

A message never travels deeper than this module.
"""

from __future__ import annotations

import re
from math import isfinite, nan
from typing import TYPE_CHECKING, Literal, cast

from blockyard.common.v1 import pooling_pb2
from blockyard.errors import Violation, invalid, to_status
from blockyard.logprob_columns import encode_prompt_logprobs, join_logprobs, split_logprobs
from blockyard.lora.virtual_tokens import MAX_VIRTUAL_TOKENS, virtual_ids
from blockyard.paths import wrong_name, wrong_path
from blockyard.pooling.columns import join_values
from blockyard.scheduler.v1 import scheduler_pb2
from blockyard.tracing.codec import decode_trace_context
from scheduler_service.core.values import BeamSpec, EarlyStopping, FinishReason, GroupSpec
from scheduler_service.error_codec import decode_error, encode_error
from scheduler_service.gateways.messages import Abort, Addition, Resubmission
from scheduler_service.replicas.loras.adapter import Adapter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.duration_pb2 import Duration

    from blockyard.common.v1 import sampling_pb2
    from scheduler_service.core.values import FinishedSequence
    from scheduler_service.gateways.messages import Accepted, Failed, Outgoing, Recovery, Resumed, ResumedSequence
    from scheduler_service.replicas.facts import ModelFacts


def decode_add(message: scheduler_pb2.AddRequest, owner: str) -> Addition:
    """Decodes a request of `owner`; raises FIELD_INVALID for what no gateway should send."""
    pools = message.HasField("pooling")
    wrong = [name for name in ("request_id", "prompt_token_ids", "n", "max_tokens") if not getattr(message, name)]
    if pools:
        wrong = [*_check_pooling(message), *(name for name in wrong if name != "max_tokens")]
    if message.HasField("resubmission") and len(message.resubmission.sequences) != message.n:
        wrong.append("resubmission.sequences")
    if wrong:
        description = "must be there, and nothing else beside pooling" if pools else "must be there"
        raise invalid(Violation(name, description) for name in wrong)
    if not isfinite(message.beam_search.length_penalty):
        raise invalid([Violation("beam_search.length_penalty", "must be a finite number")])
    if too_long := [name for name in ("request_id", "tenant") if len(getattr(message, name)) > MAX_ID_CHARACTERS]:
        raise invalid(Violation(name, f"must have at most {MAX_ID_CHARACTERS} characters") for name in too_long)
    handle = message.handle
    resubmission = _decode_resubmission(message.resubmission) if message.HasField("resubmission") else None
    message.ClearField("handle")
    message.ClearField("resubmission")
    age_seconds = _age(message.age)
    message.ClearField("age")
    adapter = decode_adapter(message.lora) if message.HasField("lora") else None
    return Addition(
        spec=_decode_group(message, owner, adapter),
        handle=handle,
        digest=message.body_digest,
        # Bytes, since a submessage would keep the whole message that it came in alive.
        message=message.SerializeToString(),
        max_queue_seconds=_seconds(message, "max_queue_time"),
        remaining_seconds=_seconds(message, "remaining_time"),
        resubmission=resubmission,
        age_seconds=age_seconds,
        adapter=adapter,
        fails_on_update=message.fails_on_update,
    )


MAX_LABELS = 128
# A tenant's name has 64, and a request's id 128 beside it and what a gateway adds.
MAX_ID_CHARACTERS = 512
# Of these the first row, or all, are needed: none may come from the prefix cache.
_OF_ALL_ROWS = (pooling_pb2.POOLING_KIND_FIRST, pooling_pb2.POOLING_KIND_MEAN, pooling_pb2.POOLING_KIND_TOKENS)


def _check_pooling(message: scheduler_pb2.AddRequest) -> list[str]:
    """Returns the names of what cannot be, of a request for numbers."""
    pooling, wants_labels = message.pooling, message.pooling.kind == pooling_pb2.POOLING_KIND_LABEL_LOGITS
    is_known = pooling.kind and pooling.kind in pooling_pb2.PoolingKind.values()
    checks = {
        "pooling.kind": is_known,
        "pooling.label_token_ids": wants_labels <= len(pooling.label_token_ids) <= (MAX_LABELS if wants_labels else 0),
        "n": message.n == 1,
        "max_tokens": not message.max_tokens,
        "beam_search": not message.HasField("beam_search"),
        "sampling.prompt_logprobs": not message.sampling.HasField("prompt_logprobs"),
    }
    return [name for name, holds in checks.items() if not holds]


_DIGEST = re.compile(r"[0-9a-f]{64}")


def decode_adapter(message: scheduler_pb2.LoraAdapter) -> Adapter:
    """Decodes an adapter that a gateway was told of; raises FIELD_INVALID for one that no scheduler tells."""
    if not (message.lora_id and message.name and message.path and _DIGEST.fullmatch(message.digest)):
        raise invalid([Violation("lora", "must have a number, a name, a path and a digest")])
    if wrong := wrong_name(message.name) or wrong_path(message.path):
        raise invalid([Violation("lora", f"its name or its path {wrong}")])
    if message.num_virtual_tokens > MAX_VIRTUAL_TOKENS:
        raise invalid([Violation("lora.num_virtual_tokens", f"must be at most {MAX_VIRTUAL_TOKENS}")])
    return Adapter(
        message.lora_id,
        message.name,
        message.path,
        message.digest,
        pinned=message.pinned,
        num_virtual_tokens=message.num_virtual_tokens,
    )


def encode_adapter(adapter: Adapter) -> scheduler_pb2.LoraAdapter:
    """Encodes an adapter that requests may have."""
    return scheduler_pb2.LoraAdapter(
        lora_id=adapter.lora_id,
        name=adapter.name,
        path=adapter.path,
        digest=adapter.digest,
        pinned=adapter.pinned,
        num_virtual_tokens=adapter.num_virtual_tokens,
    )


def _age(duration: Duration) -> float:
    """Decodes how long ago something was. Nothing is still to come."""
    return max(duration.ToNanoseconds() / 1e9, 0.0)


def _seconds(message: scheduler_pb2.AddRequest, name: Literal["max_queue_time", "remaining_time"]) -> float | None:
    return getattr(message, name).ToNanoseconds() / 1e9 if message.HasField(name) else None


def _decode_group(message: scheduler_pb2.AddRequest, owner: str, adapter: Adapter | None) -> GroupSpec:
    virtual = virtual_ids(adapter.num_virtual_tokens if adapter else 0)
    return GroupSpec(
        request_id=message.request_id,
        owner=owner,
        prompt_token_ids=(*virtual, *message.prompt_token_ids[:]),
        n=message.n,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        payload=message.sampling.SerializeToString(),
        computes_prompt=message.sampling.HasField("prompt_logprobs") or message.pooling.kind in _OF_ALL_ROWS,
        tenant=message.tenant,
        priority=message.priority,
        beams=_decode_beams(message.beam_search) if message.HasField("beam_search") else None,
        trace_context=decode_trace_context(message.trace_context) if message.HasField("trace_context") else None,
        lora=adapter.spec if adapter else None,
        pooling=message.pooling.SerializeToString() if message.HasField("pooling") else None,
    )


def _decode_beams(message: sampling_pb2.BeamSearch) -> BeamSpec:
    return BeamSpec(
        width=message.width,
        length_penalty=message.length_penalty if message.HasField("length_penalty") else 1.0,
        early_stopping=_decode_early_stopping(message.early_stopping),
    )


def _decode_early_stopping(number: int) -> EarlyStopping:
    """Decodes when a beam search ends; what has no name here is the default."""
    return next((kind for kind in EarlyStopping if kind == number), EarlyStopping.HEURISTIC)


def _decode_resubmission(message: scheduler_pb2.Resubmission) -> Resubmission:
    return Resubmission(
        age_seconds=_age(message.age),
        outputs=[list(sequence.token_ids[:]) for sequence in message.sequences],
        ended=[_decode_finish_reason(sequence.finish_reason) for sequence in message.sequences],
        logprobs=[split_logprobs(sequence.logprobs) for sequence in message.sequences],
        num_cached_tokens=message.num_cached_tokens,
        scores=[sequence.score if sequence.HasField("score") else None for sequence in message.sequences],
        errors=[decode_error(sequence.error) if sequence.HasField("error") else None for sequence in message.sequences],
        pooled=[sequence.pooled_values for sequence in message.sequences],
    )


def _decode_finish_reason(number: int) -> FinishReason | None:
    """Decodes why a sequence ended; None if it has not."""
    return next((reason for reason in FinishReason if reason == number), None)


def decode_abort(message: scheduler_pb2.AbortRequest) -> Abort:
    """Decodes what to end, and whether that is a finish or a cancel."""
    is_finish = message.reason == scheduler_pb2.ABORT_REASON_STOP_STRING
    return Abort(
        message.request_id,
        message.sequence_index if message.HasField("sequence_index") else None,
        FinishReason.STOP if is_finish else FinishReason.ABORT,
        message.num_tokens if is_finish else None,
        message.handle,
    )


def encode_outgoing(outgoing: Outgoing) -> scheduler_pb2.AttachResponse:
    """Encodes one message to a gateway."""
    update = outgoing.update
    message = scheduler_pb2.AttachResponse(sequence_ids=update.sequence_ids, token_ids=update.token_ids)
    if update.finished:
        _put_ends(message, update.finished)
    if update.prefilled:
        message.prefilled_sequence_ids.extend([first for first, _ in update.prefilled])
        message.num_cached_tokens.extend([cached for _, cached in update.prefilled])
    if update.logprobs:
        message.logprob_sequence_ids.extend([sequence_id for sequence_id, _ in update.logprobs])
        message.logprobs.CopyFrom(join_logprobs([logprobs for _, logprobs in update.logprobs]))
    for first, piece in update.prompt_logprobs:
        message.prompt_logprobs.append(encode_prompt_logprobs(first, piece))
    if update.pooled:
        _put_pooled(message, update.pooled)
    if outgoing.accepted:
        message.accepted.extend(_encode_accepted(outgoing.accepted))
    if outgoing.failed:
        message.failed.extend(_encode_failed(outgoing.failed))
    if outgoing.resumed:
        message.resumed.extend(map(encode_resumed, outgoing.resumed))
    if outgoing.recovered:
        message.recovered.extend(_encode_recovered(outgoing.recovered))
    for request_id, version in outgoing.weights:
        message.weights.add(request_id=request_id, version=version)
    _put_state(message, outgoing)
    return message


def _put_state(message: scheduler_pb2.AttachResponse, outgoing: Outgoing) -> None:
    if outgoing.facts:
        message.facts.CopyFrom(_encode_facts(outgoing.facts))
    if outgoing.readiness:
        message.readiness.ready = outgoing.readiness.ready
        message.readiness.message = outgoing.readiness.message
    if outgoing.loras is not None:
        message.loras.CopyFrom(scheduler_pb2.LoraAdapters(adapters=map(encode_adapter, outgoing.loras)))


def _put_ends(message: scheduler_pb2.AttachResponse, finished: list[FinishedSequence]) -> None:
    message.finished_sequence_ids.extend([end.sequence_id for end in finished])
    message.finish_reasons.extend([_encode_finish_reason(end.reason) for end in finished])
    if any(end.score is not None for end in finished):
        message.finish_scores.extend([nan if end.score is None else end.score for end in finished])
    for end in finished:
        if end.error is not None:
            message.sequence_failures.add(sequence_id=end.sequence_id, status=encode_error(end.error))


def _put_pooled(message: scheduler_pb2.AttachResponse, pooled: list[tuple[int, bytes]]) -> None:
    message.pooled_sequence_ids.extend([sequence_id for sequence_id, _ in pooled])
    sizes, message.pooled_values = join_values([values for _, values in pooled])
    message.pooled_sizes.extend(sizes)


def _encode_finish_reason(reason: FinishReason | None) -> sampling_pb2.FinishReason.ValueType:
    """Encodes why a sequence ended; UNSPECIFIED if it has not."""
    return cast("sampling_pb2.FinishReason.ValueType", reason.value if reason else 0)


def _encode_accepted(accepted: Iterable[Accepted]) -> list[scheduler_pb2.RequestAccepted]:
    return [
        scheduler_pb2.RequestAccepted(request_id=request_id, first_sequence_id=first, handle=handle)
        for request_id, first, handle in accepted
    ]


def _encode_failed(failed: Iterable[Failed]) -> list[scheduler_pb2.RequestFailed]:
    return [
        scheduler_pb2.RequestFailed(request_id=request_id, status=to_status(error), handle=handle)
        for request_id, error, handle in failed
    ]


def encode_resumed(resumed: Resumed) -> scheduler_pb2.RequestResumed:
    """Encodes a request with all that it has generated."""
    first = resumed.first_sequence_id
    return scheduler_pb2.RequestResumed(
        handle=resumed.handle,
        request=scheduler_pb2.AddRequest.FromString(resumed.message),
        first_sequence_id=first,
        sequences=[_encode_transcript(sequence) for sequence in resumed.sequences],
        num_cached_tokens=resumed.num_cached_tokens,
        prompt_logprobs=[encode_prompt_logprobs(first, piece) for piece in resumed.prompt_logprobs],
    )


def _encode_transcript(sequence: ResumedSequence) -> scheduler_pb2.SequenceTranscript:
    return scheduler_pb2.SequenceTranscript(
        token_ids=sequence.token_ids,
        finish_reason=_encode_finish_reason(sequence.finish_reason),
        logprobs=join_logprobs(sequence.logprobs) if sequence.logprobs else None,
        score=sequence.score,
        error=encode_error(sequence.error) if sequence.error else None,
        pooled_values=sequence.pooled,
    )


def _encode_recovered(recoveries: Iterable[Recovery]) -> list[scheduler_pb2.RequestRecovered]:
    return [
        scheduler_pb2.RequestRecovered(
            request_id=recovery.request_id,
            cause=recovery.cause,
            num_replayed_tokens=recovery.num_replayed_tokens,
            exact=recovery.exact,
        )
        for recovery in recoveries
    ]


def _encode_facts(facts: ModelFacts) -> scheduler_pb2.ModelFacts:
    return scheduler_pb2.ModelFacts(
        model_digest=facts.model_digest,
        vocab_size=facts.vocab_size,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        determinism_id=facts.determinism_id,
        batch_invariant=facts.batch_invariant,
        max_num_seqs=facts.max_num_seqs,
        weights_version=facts.weights_version,
        task=pooling_pb2.Task.ValueType(facts.task),
        max_prompt_len=facts.max_prompt_len,
        warnings=facts.warnings,
    )
