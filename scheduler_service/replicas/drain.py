"""The drain of a replica: whether an operator wants one, and tasks that wait for that to change.

Knows neither steps nor workers.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")

# How often it is looked who is there while a replica is drained.
LOOK_SECONDS = 1.0


class Drain:
    """One replica's. `is_wanted`: it is to take no requests; `is_done`: it has none, and its worker is left alone."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.is_done = False
        self._news = asyncio.Event()

    def begin(self) -> None:
        """The replica is to take no requests."""
        self.is_wanted = True
        self._news.set()

    def end(self) -> None:
        """It is to take requests again."""
        self.is_wanted = self.is_done = False
        self._news.set()

    def reconsider(self) -> None:
        """Makes tasks that wait here look again: something changed that may matter to them."""
        self._news.set()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits until something makes a condition true. For one task at a time."""
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def rest(self, look: Callable[[], Awaitable[None]]) -> None:
        """Waits, drained, until the drain is wanted no more; calls `look` every second meanwhile."""
        while self.is_wanted:
            self.is_done = True
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
