"""Puts replicas to sleep and wakes them: has a replica leave its requests, then asks its workers, all of them.

Knows no messages. A worker reports its own state; this keeps only what was asked of a replica.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blockyard.contract.workers import MemoryTag, MemoryUse, SavedState, SaveRequest, WorkerState
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.telemetry import EventLogger
from scheduler_service.operations import operations_link
from scheduler_service.replicas.drain import Leaving

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Iterable

    from blockyard.clock import Clock
    from scheduler_service.operations.operations_link import SaveProgress
    from scheduler_service.replicas.engine import Engine
    from scheduler_service.replicas.rank import Rank
    from scheduler_service.requests.dispatcher import Dispatcher
    from scheduler_service.requests.registry import RequestRegistry

log = EventLogger(__name__)

LEVELS = (1, 2)
# A worker sees that its step stream was cancelled within a step.
STREAM_END_SECONDS = 30.0
POLL_SECONDS = 0.01
ASLEEP, STALE = "asleep", "awake, and its weights have to be loaded anew"
SAVING = "saving its weights"
T = TypeVar("T")


class Mode(Enum):
    """What happens to the requests of a replica that must have none."""

    KEEP = Leaving.AT_ONCE
    WAIT = Leaving.FINISHED
    ABORT = "fail"


class Awake(NamedTuple):
    """Which memory is still asleep at any worker of a replica, and whether weights must be loaded anew."""

    asleep: frozenset[MemoryTag]
    is_stale: bool


class Operations:
    """One object for the scheduler's process."""

    def __init__(self, dispatcher: Dispatcher, requests: RequestRegistry, clock: Clock) -> None:
        self.clock = clock
        self._dispatcher = dispatcher
        self._requests = requests
        self._running: dict[Engine, str] = {}

    async def sleep(self, engine: Engine, level: int, mode: Mode) -> list[MemoryUse]:
        """Has a replica leave its requests and release its memory; returns what each worker released, by rank.

        Raises BlockyardError: FIELD_INVALID; WRONG_STATE while something else is done to the replica, or it is not set
        up; what a worker says. Then the replica goes on.
        """
        if level not in LEVELS:
            raise invalid([Violation("level", "must be 1 or 2")])
        with self.alone(engine, "SleepReplica"), self.goes_on(engine, only_if_it_fails=True):
            await self.leave(engine, mode, ASLEEP)
            uses = await each(engine.replica.ranks, lambda rank: operations_link.sleep(rank, level))
            engine.sleep_level = max(level, engine.sleep_level)
        await engine.replica.look()
        self._announce(engine, ASLEEP)
        freed_bytes = sum(use.freed_bytes for use in uses)
        log.info("a replica is asleep", replica_id=engine.replica_id, level=level, freed_bytes=freed_bytes)
        return uses

    async def wake(self, engine: Engine, tags: frozenset[MemoryTag], *, reload: bool) -> Awake:
        """Has a replica take memory again, and requests if nothing is asleep and no weights are stale.

        Weights come first, so that what is loaded anew has room.

        Raises BlockyardError: FIELD_INVALID for a tag that is awake everywhere; WRONG_STATE while something else is
        done to the replica; what a worker says. Then it stays asleep.
        """
        with self.alone(engine, "WakeReplica"):
            awake = await look(engine)
            if wrong := sorted(tag.name for tag in tags - awake.asleep):
                raise invalid([Violation("tags", f"not asleep at any worker: {', '.join(wrong)}")])
            due, ranks = tags or awake.asleep, engine.replica.ranks
            await self._take(ranks, due & {MemoryTag.WEIGHTS})
            if reload:
                await look(engine)
                stale = [rank for rank in ranks if rank.worker is not None and rank.worker.sleep.weights_are_stale]
                source = engine.replica.weights
                await each(stale, lambda rank: operations_link.reload(rank, source))
            await self._take(ranks, due & {MemoryTag.KV_CACHE})
            awake = await look(engine)
            if awake.asleep:
                self._announce(engine, ASLEEP)
            elif awake.is_stale:
                self._announce(engine, STALE)
            else:
                self._end_rest(engine)
            log.info("a replica is woken", replica_id=engine.replica_id, is_stale=awake.is_stale)
            return awake

    async def _take(self, ranks: Iterable[Rank], tags: frozenset[MemoryTag]) -> None:
        """Has each worker take the memory of these tags that it has given up."""
        due = [rank for rank in ranks if rank.worker is not None and rank.worker.sleep.asleep & tags]
        await each(due, lambda rank: operations_link.wake_up(rank, tags))

    async def save(
        self, engine: Engine, request: SaveRequest, mode: Mode, on_progress: Callable[[SaveProgress], None]
    ) -> list[SavedState]:
        """Has all workers of a replica save their weights; returns what each has saved, by rank.

        The replica has no requests meanwhile, and takes them again afterwards unless it had none before.

        Raises BlockyardError: WRONG_STATE while something else is done to the replica; what a worker says, once all
        have answered.
        """
        with self.alone(engine, "SaveState"), self.goes_on(engine):
            if engine.drain.is_wanted:
                await engine.drain.wait_until_done()
            else:
                await self.leave(engine, mode, SAVING)
            saved = await each(engine.replica.ranks, lambda rank: operations_link.save(rank, request, on_progress))
        num_bytes = sum(worker.num_bytes for worker in saved)
        log.info("a replica is saved", replica_id=engine.replica_id, folder=request.folder, bytes=num_bytes)
        return saved

    # Requests.

    @contextmanager
    def alone(self, engine: Engine, operation: str) -> Generator[None]:
        """Allows one operation on a replica at a time."""
        if running := self._running.get(engine):
            raise BlockyardError(Reason.WRONG_STATE, f"{running} is running on replica {engine.replica_id}")
        self._running[engine] = operation
        try:
            yield
        finally:
            del self._running[engine]

    @contextmanager
    def goes_on(self, engine: Engine, *, only_if_it_fails: bool = False) -> Generator[None]:
        """Resumes a replica after an operation, unless it was drained before."""
        had_left, has_failed = engine.drain.is_wanted, True
        try:
            yield
            has_failed = False
        finally:
            if not had_left and (has_failed or not only_if_it_fails):
                self._end_rest(engine)

    async def leave(self, engine: Engine, mode: Mode, message: str) -> None:
        """Has a replica leave its requests, and waits until it has none and its workers' streams have ended."""
        log.info("a replica leaves its requests", replica_id=engine.replica_id, mode=mode.name, reason=message)
        if mode is Mode.ABORT:
            error = BlockyardError(Reason.SLEEPING, f"the replica will soon be {message}", retry_after_seconds=1.0)
            self._dispatcher.fail_all(self._requests.find_of(engine), error)
        leaving = mode.value if isinstance(mode.value, Leaving) else Leaving.AT_ONCE
        engine.drain.begin(leaving, message)
        self._dispatcher.on_readiness_changed(engine)
        await engine.drain.wait_until_done()
        async with asyncio.timeout(STREAM_END_SECONDS):
            # The state belongs to another process, so there is no event to wait for.
            while await self._is_running(engine):  # noqa: ASYNC110
                await asyncio.sleep(POLL_SECONDS)

    async def _is_running(self, engine: Engine) -> bool:
        await engine.replica.look()
        return any(rank.state is WorkerState.RUNNING for rank in engine.replica.ranks)

    def _end_rest(self, engine: Engine) -> None:
        engine.sleep_level = 0
        engine.drain.end()
        self._dispatcher.on_readiness_changed(engine)

    def _announce(self, engine: Engine, message: str) -> None:
        engine.drain.message = message
        engine.set_not_ready(message)


async def look(engine: Engine) -> Awake:
    """Asks all workers of a replica what is asleep."""
    await engine.replica.look()
    infos = [rank.worker.sleep for rank in engine.replica.ranks if rank.worker is not None]
    asleep = frozenset(tag for info in infos for tag in info.asleep)
    return Awake(asleep, any(info.weights_are_stale for info in infos))


async def each(ranks: Iterable[Rank], work: Callable[[Rank], Coroutine[Any, Any, T]]) -> list[T]:
    """Runs `work` for all ranks at once. Raises the first error once all have answered."""
    answers = await asyncio.gather(*map(work, ranks), return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]
