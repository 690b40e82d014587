"""The call that has a worker save its weights. Every failure leaves here as a BlockyardError that names the worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.codec.workers import SAVED_STATE, encode_save_request
from blockyard.errors import BlockyardError, Reason
from scheduler_service.operations.memory_link import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.contract.workers import SavedState, SaveRequest
    from scheduler_service.replicas.rank import Rank


class SaveProgress(NamedTuple):
    rank: int
    done_bytes: int
    total_bytes: int


async def save(rank: Rank, request: SaveRequest, on_progress: Callable[[SaveProgress], None]) -> SavedState:
    with named(rank):
        async for event in rank.link.stream("SaveState", encode_save_request(request)):
            if event.HasField("saved"):
                return SAVED_STATE.decode(event.saved)
            progress = event.progress
            on_progress(SaveProgress(rank.parallel.rank, progress.done_bytes, progress.total_bytes))
        raise BlockyardError(Reason.BUG, "the worker ended SaveState without an answer")
