"""Reads the scheduler's load at a scrape of the gateway's /metrics, and keeps it for a second.

A scrape waits briefly for the scheduler's answer, and only while the gateway is attached; without an answer the scrape
leaves the scheduler's metrics out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from gateway.readings import ReplicaReading, SchedulerReading

# A reading younger than this is reused.
MAX_AGE_SECONDS = 1.0
ANSWER_SECONDS = 0.5
# How long a scrape waits for the event loop, which may be busy.
LOOP_SECONDS = 1.0


class SchedulerReadings:
    """Keeps the latest reading. `refresh` runs on the event loop; `fetch` and the properties serve any thread."""

    def __init__(
        self,
        is_attached: Callable[[], bool],
        ask: Callable[[float], Awaitable[SchedulerReading]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask`: asks for the load, with a time limit in seconds; raises grpc.RpcError without an answer."""
        self._is_attached = is_attached
        self._ask_scheduler = ask
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        # The latest reading; None if the scheduler did not answer.
        self.reading: SchedulerReading | None = None

    @property
    def replicas(self) -> tuple[ReplicaReading, ...]:
        """The latest readings of the replicas; empty if the scheduler did not answer."""
        return self.reading.replicas if self.reading else ()

    def start(self) -> None:
        """Enables `fetch`, which asks the scheduler on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Disables `fetch`."""
        self._loop = None

    def fetch(self) -> None:
        """Refreshes the reading unless it is younger than a second, waiting briefly. Called from another thread."""
        if (loop := self._loop) is None:
            return
        refreshing = asyncio.run_coroutine_threadsafe(self.refresh(), loop)
        with suppress(TimeoutError, concurrent.futures.CancelledError):
            refreshing.result(LOOP_SECONDS)

    async def refresh(self) -> None:
        """Asks the scheduler unless the last reading is recent. Concurrent callers wait for the same answer."""
        if self._asking is None or self._asking.done():
            if self._clock() - self._read_at < MAX_AGE_SECONDS and self._is_attached():
                return
            self._asking = asyncio.create_task(self._ask(), name="scheduler reading")
        # A cancelled caller must not cancel the request of the other callers.
        await asyncio.shield(self._asking)

    async def _ask(self) -> None:
        reading: SchedulerReading | None = None
        if self._is_attached():
            with suppress(grpc.RpcError):
                reading = await self._ask_scheduler(ANSWER_SECONDS)
        # Keep a missing answer too: the next scrape then does not wait for the scheduler again.
        self.reading, self._read_at = reading, self._clock()
