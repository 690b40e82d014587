"""Reads the schedulers' load at a scrape of the gateway's /metrics, and keeps it for a second.

A scrape waits briefly for a scheduler's answer, and only while the gateway is attached to it; without an answer the
scrape leaves the scheduler's metrics out.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.readings import SchedulerReading

# A reading younger than this is reused.
MAX_AGE_SECONDS = 1.0
ANSWER_SECONDS = 0.5
# How long a scrape waits for the event loop, which may be busy.
LOOP_SECONDS = 1.0


class SchedulerReader(Protocol):
    """The part of the scheduler link that reads its load."""

    @property
    def takes_requests(self) -> bool:
        """Whether the gateway is attached."""
        ...

    async def read_scheduler(self, timeout_seconds: float) -> SchedulerReading:
        """Asks for the scheduler's load; raises grpc.RpcError if the scheduler does not answer."""
        ...


class SchedulerReadings:
    """Keeps the latest readings. `refresh` runs on the event loop; `fetch` and `by_model` serve any thread.

    Args:
        links: the connections to the schedulers, by the names of their models.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, links: Mapping[str, SchedulerReader], clock: Callable[[], float] = time.monotonic) -> None:
        self._links = links
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._read_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self.by_model: Mapping[str, SchedulerReading] = {}
        """The latest readings by the names of the models, without schedulers that did not answer."""

    def start(self) -> None:
        """Enables `fetch`, which asks the schedulers on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Disables `fetch`."""
        self._loop = None

    def fetch(self) -> None:
        """Refreshes the readings unless they are younger than a second, waiting briefly. Called from another thread."""
        if (loop := self._loop) is None:
            return
        refreshing = asyncio.run_coroutine_threadsafe(self.refresh(), loop)
        with suppress(TimeoutError, concurrent.futures.CancelledError):
            refreshing.result(LOOP_SECONDS)

    async def refresh(self) -> None:
        """Asks the schedulers unless the last readings are recent. Concurrent callers wait for the same answers."""
        if self._asking is None or self._asking.done():
            attached = {name for name, link in self._links.items() if link.takes_requests}
            if self._clock() - self._read_at < MAX_AGE_SECONDS and self.by_model.keys() <= attached:
                return
            self._asking = asyncio.create_task(self._ask(attached), name="scheduler reading")
        # A cancelled caller must not cancel the request of the other callers.
        await asyncio.shield(self._asking)

    async def _ask(self, names: set[str]) -> None:
        async def ask(name: str) -> tuple[str, SchedulerReading | None]:
            with suppress(grpc.RpcError):
                return name, await self._links[name].read_scheduler(ANSWER_SECONDS)
            return name, None

        answers = await asyncio.gather(*map(ask, sorted(names)))
        # Keep a missing answer too: the next scrape then does not wait for the scheduler again.
        self.by_model = {name: reading for name, reading in answers if reading is not None}
        self._read_at = self._clock()
