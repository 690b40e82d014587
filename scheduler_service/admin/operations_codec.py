"""Decodes what an operator wants of replicas as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2
from blockyard.errors import Violation, invalid
from blockyard.model_files import check_revision
from blockyard.paths import check_path, wrong_name, wrong_path
from scheduler_service.admin.status_codec import encode_replica
from scheduler_service.operations.operations import Mode
from scheduler_service.operations.saving_link import SaveRequest
from scheduler_service.operations.updates import Expected, Update
from scheduler_service.replicas.codec import TAGS, decode_tags
from scheduler_service.replicas.facts import WeightsSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.operations.saving_link import Progress, Saved
    from scheduler_service.operations.updates import Event
    from scheduler_service.replicas.facts import MemoryTag

_MODES: dict[int, Mode] = {
    admin_pb2.LEAVE_MODE_UNSPECIFIED: Mode.KEEP,
    admin_pb2.LEAVE_MODE_KEEP: Mode.KEEP,
    admin_pb2.LEAVE_MODE_WAIT: Mode.WAIT,
    admin_pb2.LEAVE_MODE_ABORT: Mode.ABORT,
}

_STATE_FORMATS: dict[int, str] = {
    administration_pb2.STATE_FORMAT_SHARDED: "SHARDED",
    administration_pb2.STATE_FORMAT_PACKED: "PACKED",
}


def decode_mode(number: int) -> Mode:
    """Decodes what becomes of requests; raises BlockyardError FIELD_INVALID for what is not known."""
    if number not in _MODES:
        raise invalid([Violation("mode", f"{number} is not known to this scheduler")])
    return _MODES[number]


def decode_save(request: admin_pb2.SaveStateRequest) -> SaveRequest:
    """Decodes what to save; raises BlockyardError FIELD_INVALID for an unknown format or what is no path."""
    violations: list[Violation] = []
    if request.format not in _STATE_FORMATS:
        violations.append(Violation("format", "must be STATE_FORMAT_SHARDED or STATE_FORMAT_PACKED"))
    if wrong := wrong_path(request.folder):
        violations.append(Violation("folder", wrong))
    if violations:
        raise invalid(violations)
    return SaveRequest(_STATE_FORMATS[request.format], request.folder, request.max_file_bytes)


def encode_save_progress(progress: Progress) -> admin_pb2.SaveStateResponse:
    """Encodes how far a worker is."""
    return admin_pb2.SaveStateResponse(
        progress=admin_pb2.SaveProgress(
            rank=progress.rank, done_bytes=progress.done_bytes, total_bytes=progress.total_bytes
        )
    )


def encode_saved(workers: Sequence[Saved]) -> admin_pb2.SaveStateResponse:
    """Encodes what each worker has saved."""
    return admin_pb2.SaveStateResponse(
        workers=[
            administration_pb2.SavedState(folder=each.folder, files=each.files, num_bytes=each.num_bytes)
            for each in workers
        ]
    )


def decode_wanted_tags(numbers: Sequence[int]) -> frozenset[MemoryTag]:
    """Decodes tags; raises BlockyardError FIELD_INVALID for one that is not known."""
    if unknown := [number for number in numbers if number not in TAGS]:
        raise invalid([Violation("tags", f"{number} is not known to this scheduler") for number in unknown])
    return decode_tags(numbers)


def decode_update(request: admin_pb2.UpdateWeightsRequest) -> Update:
    """Decodes other weights; raises BlockyardError FIELD_INVALID."""
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
    """Encodes what happens to a replica that gets other weights."""
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
