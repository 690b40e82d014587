"""Decodes operators' requests about whole replicas, and encodes the answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.contract.codec.workers import SAVED_STATE, STATE_FORMATS
from blockyard.contract.workers import SavedState, SaveRequest, WeightsSource
from blockyard.errors import Violation, invalid
from blockyard.model_files import check_revision
from blockyard.paths import check_path, wrong_name, wrong_path
from scheduler_service.admin.status_codec import encode_replica
from scheduler_service.operations.operations import Mode
from scheduler_service.operations.updates import Event, Expected, Update

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.operations.operations_link import SaveProgress

_MODES: dict[int, Mode] = {
    admin_pb2.LEAVE_MODE_UNSPECIFIED: Mode.KEEP,
    admin_pb2.LEAVE_MODE_KEEP: Mode.KEEP,
    admin_pb2.LEAVE_MODE_WAIT: Mode.WAIT,
    admin_pb2.LEAVE_MODE_ABORT: Mode.ABORT,
}


def decode_mode(number: int) -> Mode:
    """Decodes what happens to the requests; raises BlockyardError FIELD_INVALID for an unknown mode."""
    if number not in _MODES:
        raise invalid([Violation("mode", f"{number} is not known to this scheduler")])
    return _MODES[number]


def decode_save(request: admin_pb2.SaveStateRequest) -> SaveRequest:
    """Decodes a request to save weights; raises BlockyardError FIELD_INVALID for an unknown format or a wrong path."""
    violations: list[Violation] = []
    save_format = STATE_FORMATS.find(request.format)
    if save_format is None:
        violations.append(Violation("format", "must be STATE_FORMAT_SHARDED or STATE_FORMAT_PACKED"))
    if wrong := wrong_path(request.folder):
        violations.append(Violation("folder", wrong))
    if violations or save_format is None:
        raise invalid(violations)
    return SaveRequest(save_format, request.folder, request.max_file_bytes)


def encode_save_progress(progress: SaveProgress) -> admin_pb2.SaveStateResponse:
    return admin_pb2.SaveStateResponse(
        progress=admin_pb2.SaveProgress(
            rank=progress.rank, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
        )
    )


def encode_saved(workers: Sequence[SavedState]) -> admin_pb2.SaveStateResponse:
    return admin_pb2.SaveStateResponse(workers=map(SAVED_STATE.encode, workers))


def decode_update(request: admin_pb2.UpdateWeightsRequest) -> Update:
    """Decodes an update of weights; raises BlockyardError FIELD_INVALID."""
    if wrong := wrong_name(request.version):
        raise invalid([Violation("version", wrong)])
    if request.model:
        check_path("model", request.model)
    if request.revision:
        check_revision(request.revision)
    return Update(
        WeightsSource(request.model, request.revision, request.version),
        tuple(head.SerializeToString() for head in request.tensors),
        decode_mode(request.mode),
        request.together,
    )


def encode_update_event(event: Event) -> admin_pb2.UpdateWeightsResponse:
    response = admin_pb2.UpdateWeightsResponse(replica_id=event.engine.replica_id)
    if isinstance(event, Expected):
        response.expected.worker_addresses.extend(event.worker_addresses)
        response.expected.ticket = event.ticket
        response.expected.order.extend(event.orders[0])
        response.expected.orders.extend(admin_pb2.TensorOrder(indices=order) for order in event.orders)
    else:
        response.updated.replica.CopyFrom(encode_replica(event.engine))
        response.updated.determinism_id = event.engine.facts.determinism_id if event.engine.facts else ""
    return response
