"""Decodes what an operator wants of replicas as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.errors import Violation, invalid
from scheduler_service.admin.status_codec import encode_replica
from scheduler_service.operations.operations import Mode
from scheduler_service.operations.updates import Expected, Update
from scheduler_service.replicas.codec import TAGS, decode_tags
from scheduler_service.replicas.facts import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.operations.updates import Event
    from scheduler_service.replicas.facts import MemoryTag

_MODES: dict[int, Mode] = {
    admin_pb2.LEAVE_MODE_UNSPECIFIED: Mode.KEEP,
    admin_pb2.LEAVE_MODE_KEEP: Mode.KEEP,
    admin_pb2.LEAVE_MODE_WAIT: Mode.WAIT,
    admin_pb2.LEAVE_MODE_ABORT: Mode.ABORT,
}


def decode_mode(number: int) -> Mode:
    """Decodes what becomes of requests; raises BlockyardError FIELD_INVALID for what is not known."""
    if number not in _MODES:
        raise invalid([Violation("mode", f"{number} is not known to this scheduler")])
    return _MODES[number]


def decode_wanted_tags(numbers: Sequence[int]) -> frozenset[MemoryTag]:
    """Decodes tags; raises BlockyardError FIELD_INVALID for one that is not known."""
    if unknown := [number for number in numbers if number not in TAGS]:
        raise invalid([Violation("tags", f"{number} is not known to this scheduler") for number in unknown])
    return decode_tags(numbers)


def decode_update(request: admin_pb2.UpdateWeightsRequest) -> Update:
    """Decodes other weights; raises BlockyardError FIELD_INVALID."""
    return Update(
        WeightsSource(request.model, request.revision, request.version),
        tuple(head.SerializeToString() for head in request.tensors),
        decode_mode(request.mode),
        request.together,
    )


def encode_update_event(event: Event) -> admin_pb2.UpdateWeightsResponse:
    """Encodes what happens to a replica that gets other weights."""
    response = admin_pb2.UpdateWeightsResponse(replica_id=event.engine.replica_id)
    if isinstance(event, Expected):
        response.expected.worker_addresses.extend(event.worker_addresses)
        response.expected.ticket = event.ticket
        response.expected.order.extend(event.order)
    else:
        response.updated.replica.CopyFrom(encode_replica(event.engine))
        response.updated.determinism_id = event.engine.facts.determinism_id if event.engine.facts else ""
    return response
