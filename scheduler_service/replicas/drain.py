"""The drain of a replica: whether it is wanted, what happens to the requests, and the tasks that wait for it.

Knows neither steps nor workers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler_service.replicas.epoch_failure import DRAINED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

# How often the workers of a drained replica are looked for.
LOOK_SECONDS = 1.0


class Leaving(Enum):
    """What a drained replica does with its requests."""

    FOR_OTHERS = "hand over to other replicas, or finish if there are none"
    AT_ONCE = "give back at once, to go on at any replica that takes requests"
    FINISHED = "finish"


class Drain:
    """One replica's drain.

    `is_wanted`: the replica takes no new requests; `is_done`: it has none left, and sends its worker nothing.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.is_done = False
        # Why the replica takes no requests, for people.
        self.message = DRAINED
        self._leaving = Leaving.FOR_OTHERS
        self._news = asyncio.Event()
        self._done = asyncio.Event()

    def begin(self, leaving: Leaving = Leaving.FOR_OTHERS, message: str = DRAINED) -> None:
        self.is_wanted, self._leaving, self.message = True, leaving, message
        self._news.set()

    def end(self) -> None:
        self.is_wanted = self.is_done = False
        self._done.clear()
        self._news.set()

    def leaves_at_once(self, *, serves_without: bool) -> bool:
        """Whether the replica takes no further step; `serves_without`: another replica takes requests."""
        return self._leaving is Leaving.AT_ONCE or (self._leaving is Leaving.FOR_OTHERS and serves_without)

    def reconsider(self) -> None:
        self._news.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until a condition is true. For one task at a time."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def wait_until_done(self) -> None:
        """Waits until the replica has no requests. For any number of tasks."""
        await self._done.wait()

    async def rest(self, look: Callable[[], Awaitable[None]]) -> None:
        """Waits, drained, until the drain ends, and calls `look` every second meanwhile."""
        while self.is_wanted:
            self.is_done = True
            self._done.set()
            await look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.wait_until(lambda: not self.is_wanted)

    async def unless_wanted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Does work and returns its result; cancels it and returns None if a drain is wanted or becomes wanted."""
        task = asyncio.create_task(work)
        drained = asyncio.create_task(self.wait_until(lambda: self.is_wanted))
        try:
            await asyncio.wait({task, drained}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for each in (task, drained):
                each.cancel()
            await asyncio.wait({task, drained})
