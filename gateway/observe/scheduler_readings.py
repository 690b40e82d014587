"""What the scheduler has to do, for the gateway's own /metrics: asked for when somebody scrapes, and kept for a moment.

A scrape waits for the scheduler's answer briefly, and only while the gateway is attached; without an answer it goes on
without these values.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.scheduler_messages import ReplicaReading, SchedulerReading

# An answer younger than this is given again.
MAX_AGE_SECONDS = 1.0
ANSWER_SECONDS = 0.5
# For a loop that is busy.
LOOP_SECONDS = 1.0


class SchedulerReader(Protocol):
    """The link, as it is needed here."""

    @property
    def takes_requests(self) -> bool:
        """Whether the gateway is attached."""
        ...

    async def read_scheduler(self, timeout_seconds: float) -> SchedulerReading:
        """Asks how the scheduler is; raises grpc.RpcError when it does not answer."""
        ...


class SchedulerReadings:
    """The latest reading. `refresh` belongs to the loop, the rest may be used by any thread."""

    def __init__(self, link: SchedulerReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._reading: SchedulerReading | None = None

    @property
    def reading(self) -> SchedulerReading | None:
        """How the scheduler was a moment ago; None where it does not answer."""
        return self._reading

    @property
    def replicas(self) -> tuple[ReplicaReading, ...]:
        """How the replicas were a moment ago; none where the scheduler does not answer."""
        reading = self._reading
        return reading.replicas if reading else ()

    def start(self) -> None:
        """Begins to ask when `fetch` is called. On the loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Asks no more."""
        self._loop = None

    def fetch(self) -> None:
        """Has a reading at hand that is at most a second old, if there is one to get in time. From another thread."""
        if (loop := self._loop) is None:
            return
        refreshing = asyncio.run_coroutine_threadsafe(self.refresh(), loop)
        with suppress(TimeoutError, concurrent.futures.CancelledError):
            refreshing.result(LOOP_SECONDS)

    async def refresh(self) -> None:
        """Asks, unless the last reading is young; whoever comes while it is asked waits for the same answer."""
        if self._asking is None or self._asking.done():
            if self._clock() - self._read_at < MAX_AGE_SECONDS and self._link.takes_requests:
                return
            self._asking = asyncio.create_task(self._ask(), name="scheduler reading")
        # When one of those who wait leaves, the others wait on.
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        reading: SchedulerReading | None = None
        if self._link.takes_requests:
            with suppress(grpc.RpcError):
                reading = await self._link.read_scheduler(ANSWER_SECONDS)
        # Also of a scheduler that did not answer: the next scrape need not wait for it as well.
        self._reading, self._read_at = reading, self._clock()
