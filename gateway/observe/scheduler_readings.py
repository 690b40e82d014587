"""Reads the scheduler's load for the gateway's own /metrics, at a scrape, and keeps it for a moment.

A scrape waits briefly for the scheduler's answer, and only while the gateway is attached; without an answer it leaves
these values out.
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

    from gateway.readings import ReplicaReading, SchedulerReading

# An answer younger than this is given again.
MAX_AGE_SECONDS = 1.0
ANSWER_SECONDS = 0.5
# For a loop that is busy.
LOOP_SECONDS = 1.0


class SchedulerReader(Protocol):
    """Asks the scheduler: the link."""

    @property
    def takes_requests(self) -> bool:
        """Whether the gateway is attached."""
        ...

    async def read_scheduler(self, timeout_seconds: float) -> SchedulerReading:
        """Asks for the scheduler's load; raises grpc.RpcError when it does not answer."""
        ...


class SchedulerReadings:
    """Keeps the latest reading. `refresh` runs on the loop, the rest in any thread."""

    def __init__(self, link: SchedulerReader, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self._reading: SchedulerReading | None = None

    @property
    def reading(self) -> SchedulerReading | None:
        """The latest reading; None where the scheduler does not answer."""
        return self._reading

    @property
    def replicas(self) -> tuple[ReplicaReading, ...]:
        """The latest readings of the replicas; none where the scheduler does not answer."""
        reading = self._reading
        return reading.replicas if reading else ()

    def start(self) -> None:
        """Lets `fetch` ask the scheduler, on this loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Lets `fetch` ask no more."""
        self._loop = None

    def fetch(self) -> None:
        """Refreshes the reading unless it is younger than a second, waiting briefly. Called from another thread."""
        if (loop := self._loop) is None:
            return
        refreshing = asyncio.run_coroutine_threadsafe(self.refresh(), loop)
        with suppress(TimeoutError, concurrent.futures.CancelledError):
            refreshing.result(LOOP_SECONDS)

    async def refresh(self) -> None:
        """Asks unless the last reading is young; callers that come in the meantime wait for the same answer."""
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
