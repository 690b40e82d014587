"""Gives replicas other weights: one after another, or all at once. Tensors go from the caller to the workers.

Knows no messages.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from scheduler_service.operations import operations_link
from scheduler_service.operations.operations import POLL_SECONDS, Mode, Operations, each

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from blockyard.contract.workers import WeightsSource
    from scheduler_service.replicas.engine import Engine

log = EventLogger(__name__)

UPDATING = "updating its weights"
TICKET_BYTES = 16
# A replica that has its weights only needs to open a stream.
READY_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Update:
    """The update. `heads`: the encoded heads of the caller's tensors; empty: the workers read `source`."""

    source: WeightsSource
    heads: tuple[bytes, ...] = ()
    mode: Mode = Mode.KEEP
    together: bool = False


class Expected(NamedTuple):
    """The workers of a replica wait for tensors, each in its own order, from a caller with the ticket."""

    engine: Engine
    worker_addresses: list[str]
    ticket: bytes
    orders: list[list[int]]


class Updated(NamedTuple):
    """A replica has the weights and takes requests again."""

    engine: Engine


Event = Expected | Updated


async def update(operations: Operations, engines: Sequence[Engine], wanted: Update) -> AsyncIterator[Event]:
    """Updates replicas, and yields what happens. The first failure ends it: the others keep what they have.

    Raises BlockyardError: WRONG_STATE for a replica that is asleep or that something else is done to;
    what a worker says.
    """
    for group in [engines] if wanted.together else [[engine] for engine in engines]:
        events: asyncio.Queue[Event | None] = asyncio.Queue()
        tasks = [asyncio.create_task(_update_one(operations, engine, wanted, events.put_nowait)) for engine in group]
        everything = asyncio.gather(*tasks)
        # The caller may leave without reading the result, and may be ended again while it waits for the tasks.
        everything.add_done_callback(lambda done: done.cancelled() or done.exception())
        everything.add_done_callback(lambda _, events=events: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            everything.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _update_one(operations: Operations, engine: Engine, wanted: Update, tell: Callable[[Event], None]) -> None:
    if engine.is_asleep:
        raise BlockyardError(Reason.WRONG_STATE, f"replica {engine.replica_id} is asleep: wake it up first")
    source, was_drained = wanted.source, engine.drain.is_wanted
    with operations.alone(engine, "UpdateWeights"), operations.goes_on(engine):
        await operations.leave(engine, wanted.mode, UPDATING)
        ranks = engine.replica.ranks
        if wanted.heads:
            ticket = operations.clock.token_bytes(TICKET_BYTES)
            orders = await each(
                ranks, lambda rank: operations_link.begin_update(rank, source.version, wanted.heads, ticket)
            )
            tell(Expected(engine, [rank.address for rank in ranks], ticket, orders))
            # If one of them fails, the caller does not send to the others either.
            await engine.replica.each(lambda rank: operations_link.finish_update(rank, source.version))
        else:
            await each(ranks, lambda rank: operations_link.reload(rank, source))
            engine.replica.weights = source
    if not was_drained:
        await _until_ready(engine)
    log.info("a replica has new weights", replica_id=engine.replica_id, version=source.version)
    tell(Updated(engine))


async def _until_ready(engine: Engine) -> None:
    try:
        async with asyncio.timeout(READY_SECONDS):
            # The replica's tasks set no event that could be awaited here.
            while not engine.takes_requests:  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError:
        message = f"replica {engine.replica_id} is not ready: {engine.readiness.message}"
        raise BlockyardError(Reason.NO_READY_WORKER, message) from None
