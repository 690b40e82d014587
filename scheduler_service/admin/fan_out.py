"""Makes one call at several workers of a replica at once, and returns the answers by rank."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from scheduler_service.replicas.rank import Rank

# A worker reports a timeout itself, since it knows whether the operation had begun.
GRACE_SECONDS = 1.0


async def ask_each(ranks: Sequence[Rank], method: str, request: Any, seconds: float) -> list[Any]:
    """Asks all of them by the same call, and returns their answers by rank.

    Raises:
        BlockyardError: OPERATION_DEADLINE, which names the ranks that did not answer in time; else the error of the
            first rank that has one, which it names too.
    """
    calls = (rank.link.call(method, request, seconds + 2 * GRACE_SECONDS) for rank in ranks)
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=seconds + GRACE_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
    failures = {rank: error for rank, task in zip(ranks, tasks, strict=True) if (error := _failure(task)) is not None}
    late = [rank for rank, error in failures.items() if error.reason is Reason.OPERATION_DEADLINE]
    if late:
        names = " and ".join(f"{rank.parallel.rank} ({rank.address})" for rank in late)
        raise BlockyardError(Reason.OPERATION_DEADLINE, f"no answer within {seconds:g} s of rank {names}")
    for rank, error in failures.items():
        message = error.message if len(ranks) == 1 else f"rank {rank.parallel.rank} ({rank.address}): {error.message}"
        raise BlockyardError(error.reason, message, error.violations, error.retry_after_seconds, error.metadata)
    return [task.result() for task in tasks]


def _failure(task: asyncio.Future[Any]) -> BlockyardError | None:
    if not task.done() or task.cancelled():
        return BlockyardError(Reason.OPERATION_DEADLINE, "no answer")
    error = task.exception()
    if error is None or isinstance(error, BlockyardError):
        return error
    raise error
