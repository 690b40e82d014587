"""The call that has a worker save its weights. Every failure leaves here as a BlockyardError that names the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockyard.common.v1 import administration_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2
from scheduler_service.operations.memory_link import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.replicas.rank import Rank


class SaveRequest(NamedTuple):
    """What to save: "SHARDED" or "PACKED", the folder, and the bytes of a file at most."""

    format: str
    folder: str
    max_file_bytes: int


class Saved(NamedTuple):
    """What a worker has saved."""

    folder: str
    files: tuple[str, ...]
    num_bytes: int


class Progress(NamedTuple):
    """How far a worker is."""

    rank: int
    done_bytes: int
    total_bytes: int


async def save(rank: Rank, request: SaveRequest, on_progress: Callable[[Progress], None]) -> Saved:
    """Has a worker save its weights; calls `on_progress` as it goes."""
    message = worker_pb2.SaveStateRequest(
        format=administration_pb2.StateFormat.Value(f"STATE_FORMAT_{request.format}"),
        folder=request.folder,
        max_file_bytes=request.max_file_bytes,
    )
    with named(rank):
        async for event in rank.link.stream("SaveState", message):
            if event.HasField("saved"):
                return Saved(event.saved.folder, tuple(event.saved.files), event.saved.num_bytes)
            progress = event.progress
            on_progress(Progress(rank.parallel.rank, progress.done_bytes, progress.total_bytes))
        raise BlockyardError(Reason.BUG, "it ended SaveState without an answer")
