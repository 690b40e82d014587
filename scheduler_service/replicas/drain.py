"""The drain of a replica: whether an operator wants one, how it leaves its requests, and tasks that wait for that.

Knows neither steps nor workers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler_service.replicas.loss import DRAINED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

# How often it is looked who is there while a replica is drained.
LOOK_SECONDS = 1.0


class Leaving(Enum):
    """When a replica that is drained leaves its requests."""

    FOR_OTHERS = "where another replica takes requests they go on there; else it finishes them"
    AT_ONCE = "they go on wherever a replica takes requests again"
    FINISHED = "it finishes them"


class Drain:
    """One replica's. `is_wanted`: it is to take no requests; `is_done`: it has none, and its worker is left alone."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.is_done = False
        # Why it takes no requests, for people.
        self.message = DRAINED
        self._leaving = Leaving.FOR_OTHERS
        self._news = asyncio.Event()
        self._done = asyncio.Event()

    def begin(self, leaving: Leaving = Leaving.FOR_OTHERS, message: str = DRAINED) -> None:
        """The replica is to take no requests."""
        self.is_wanted, self._leaving, self.message = True, leaving, message
        self._news.set()

    def end(self) -> None:
        """It is to take requests again."""
        self.is_wanted = self.is_done = False
        self._done.clear()
        self._news.set()

    def leaves_at_once(self, *, serves_without: bool) -> bool:
        """Whether it takes no further step; `serves_without`: another replica takes requests."""
        return self._leaving is Leaving.AT_ONCE or (self._leaving is Leaving.FOR_OTHERS and serves_without)

    def reconsider(self) -> None:
        """Makes tasks that wait here look again: something changed that may matter to them."""
        self._news.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until something makes a condition true. For one task at a time."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def wait_until_done(self) -> None:
        """Waits until the replica has no requests. For any number of tasks."""
        await self._done.wait()

    async def rest(self, look: Callable[[], Awaitable[None]]) -> None:
        """Waits, drained, until the drain is wanted no more; calls `look` every second meanwhile."""
        while self.is_wanted:
            self.is_done = True
            self._done.set()
            await look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.wait_until(lambda: not self.is_wanted)

    async def unless_wanted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Does work, and returns None if the drain is or comes to be wanted: then the work is cancelled."""
        task = asyncio.create_task(work)
        drained = asyncio.create_task(self.wait_until(lambda: self.is_wanted))
        try:
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, drained):
                each.cancel()
            await asyncio.wait({task, drained})
