"""The gateways' messages into values and back. A message never travels deeper than this module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Violation, invalid, to_status
from blockyard.scheduler.v1 import scheduler_pb2
from scheduler_service.core.output import FinishReason, GroupSpec, OwnerUpdate
from scheduler_service.facts import ModelFacts, Readiness

if TYPE_CHECKING:
    from collections.abc import Iterable

_FINISH_REASONS = {
    FinishReason.STOP: sampling_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: sampling_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: sampling_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: sampling_pb2.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class Abort:
    """A request to end, or one of its sequences."""

    request_id: str
    sequence_index: int | None
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Recovery:
    """A request that goes on after its worker was lost; `exact`: as it would have."""

    request_id: str
    cause: str
    num_replayed_tokens: int
    exact: bool


@dataclass(slots=True)
class Outgoing:
    """What one gateway is to be told in one message. Steps merge by extending its columns."""

    facts: ModelFacts | None = None
    readiness: Readiness | None = None
    accepted: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    failed: list[tuple[str, BlockyardError]] = field(default_factory=list[tuple[str, BlockyardError]])
    update: OwnerUpdate = field(default_factory=OwnerUpdate)
    recovered: list[Recovery] = field(default_factory=list[Recovery])


def decode_add(message: scheduler_pb2.AddRequest, owner: str) -> GroupSpec:
    """Decodes a request of `owner`; raises FIELD_INVALID for what no gateway should send."""
    wrong = [name for name in ("prompt_token_ids", "n", "max_tokens") if not getattr(message, name)]
    if wrong:
        raise invalid(Violation(name, "must be there") for name in wrong)
    return GroupSpec(
        request_id=message.request_id,
        owner=owner,
        prompt_token_ids=tuple(message.prompt_token_ids[:]),
        n=message.n,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        # Bytes, since a submessage would keep the whole message that it came in alive.
        payload=message.sampling.SerializeToString(),
    )


def decode_abort(message: scheduler_pb2.AbortRequest) -> Abort:
    """Decodes what to end, and whether that is a finish or a cancel."""
    return Abort(
        message.request_id,
        message.sequence_index if message.HasField("sequence_index") else None,
        FinishReason.STOP if message.reason == scheduler_pb2.ABORT_REASON_STOP_STRING else FinishReason.ABORT,
    )


def encode_outgoing(outgoing: Outgoing) -> scheduler_pb2.AttachResponse:
    """Encodes what a gateway is told."""
    update = outgoing.update
    message = scheduler_pb2.AttachResponse(sequence_ids=update.sequence_ids, token_ids=update.token_ids)
    if update.finished:
        message.finished_sequence_ids.extend([end.sequence_id for end in update.finished])
        message.finish_reasons.extend([_FINISH_REASONS[end.reason] for end in update.finished])
    if update.prefilled:
        message.prefilled_sequence_ids.extend([first for first, _ in update.prefilled])
        message.num_cached_tokens.extend([cached for _, cached in update.prefilled])
    if outgoing.accepted:
        message.accepted.extend(_encode_accepted(outgoing.accepted))
    if outgoing.failed:
        message.failed.extend(_encode_failed(outgoing.failed))
    if outgoing.recovered:
        message.recovered.extend(_encode_recovered(outgoing.recovered))
    if outgoing.facts:
        message.facts.CopyFrom(_encode_facts(outgoing.facts))
    if outgoing.readiness:
        message.readiness.ready = outgoing.readiness.ready
        message.readiness.message = outgoing.readiness.message
    return message


def _encode_accepted(accepted: Iterable[tuple[str, int]]) -> list[scheduler_pb2.RequestAccepted]:
    return [
        scheduler_pb2.RequestAccepted(request_id=request_id, first_sequence_id=first) for request_id, first in accepted
    ]


def _encode_failed(failed: Iterable[tuple[str, BlockyardError]]) -> list[scheduler_pb2.RequestFailed]:
    return [scheduler_pb2.RequestFailed(request_id=request_id, status=to_status(error)) for request_id, error in failed]


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
    )
