"""The calls that give a worker's memory up, take it again, load its weights anew, and save them.

Every failure leaves here as a BlockyardError that names the worker.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from blockyard.common.v1 import administration_pb2
from blockyard.contract.codec.workers import SAVED_STATE, encode_save_request, encode_tags
from blockyard.contract.workers import MemoryTag, MemoryUse, SavedState, SaveRequest, WeightsSource
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from scheduler_service.replicas.rank import Rank

# Enough to release or copy a terabyte.
MEMORY_SECONDS = 600.0
# The longest time that a trainer may take to send its tensors.
UPDATE_SECONDS = 3600.0


class SaveProgress(NamedTuple):
    rank: int
    done_bytes: int
    total_bytes: int


@contextmanager
def named(rank: Rank) -> Generator[None]:
    """Adds the worker's address to its errors."""
    try:
        yield
    except BlockyardError as error:
        message = f"the worker at {rank.address}: {error.message}"
        raise BlockyardError(error.reason, message, error.violations, error.retry_after_seconds) from None


async def sleep(rank: Rank, level: int) -> MemoryUse:
    with named(rank):
        answer = await rank.link.call("Sleep", worker_pb2.SleepRequest(level=level), MEMORY_SECONDS)
    return MemoryUse(answer.freed_bytes, answer.used_bytes)


async def wake_up(rank: Rank, tags: Collection[MemoryTag]) -> None:
    with named(rank):
        await rank.link.call("WakeUp", worker_pb2.WakeUpRequest(tags=encode_tags(tags)), MEMORY_SECONDS)


async def begin_update(rank: Rank, version: str, heads: Sequence[bytes], ticket: bytes) -> list[int]:
    """Begins an update at a worker; returns the indices of the heads in the order in which it needs their bytes."""
    request = worker_pb2.BeginWeightUpdateRequest(
        version=version, tensors=map(administration_pb2.TensorHead.FromString, heads), ticket=ticket
    )
    with named(rank):
        return list((await rank.link.call("BeginWeightUpdate", request, MEMORY_SECONDS)).order)


async def finish_update(rank: Rank, version: str) -> None:
    """Waits until a worker has all tensors of an update, and computes with them."""
    with named(rank):
        request = worker_pb2.FinishWeightUpdateRequest(version=version)
        await rank.link.call("FinishWeightUpdate", request, UPDATE_SECONDS)


async def reload(rank: Rank, source: WeightsSource) -> None:
    with named(rank):
        await rank.link.reload_weights(source)


async def save(rank: Rank, request: SaveRequest, on_progress: Callable[[SaveProgress], None]) -> SavedState:
    with named(rank):
        async for event in rank.link.stream("SaveState", encode_save_request(request)):
            if event.HasField("saved"):
                return SAVED_STATE.decode(event.saved)
            progress = event.progress
            on_progress(SaveProgress(rank.parallel.rank, progress.done_bytes, progress.total_bytes))
        raise BlockyardError(Reason.BUG, "the worker ended SaveState without an answer")
