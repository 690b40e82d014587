"""Keeps one timer for each of many keys, on the running loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

K = TypeVar("K", bound="Hashable")


class Timers(Generic[K]):
    """Calls back when the time of a key has come, unless it was cleared before."""

    def __init__(self) -> None:
        self._handles: dict[K, asyncio.TimerHandle] = {}

    def set(self, key: K, seconds: float, call: Callable[[K], None]) -> None:
        """Starts the timer of a key, in place of the one that it had."""
        self.clear(key)
        self._handles[key] = asyncio.get_running_loop().call_later(seconds, self._due, key, call)

    def _due(self, key: K, call: Callable[[K], None]) -> None:
        del self._handles[key]
        call(key)

    def clear(self, key: K) -> None:
        """Stops the timer of a key. Idempotent."""
        if (handle := self._handles.pop(key, None)) is not None:
            handle.cancel()

    def clear_all(self) -> None:
        """Stops all timers."""
        for key in list(self._handles):
            self.clear(key)
