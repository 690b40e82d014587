"""Keeps requests by name while they run and for the resume window afterwards. Also runs timers by key."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic, TypeVar

from blockyard.retention import Retention

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from gateway.live.request_state import RequestState

K = TypeVar("K", bound="Hashable")

MAX_RETAINED = 10_000
MAX_RETAINED_TOKENS = 64 * 2**20


class Timers(Generic[K]):
    """Runs at most one timer for each key. A timer calls back once, unless it is cleared. For the event loop only."""

    def __init__(self) -> None:
        self._handles: dict[K, asyncio.TimerHandle] = {}

    def set(self, key: K, seconds: float, call: Callable[[K], None]) -> None:
        """Starts the timer of a key, and stops the key's previous timer."""
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
        for key in list(self._handles):
            self.clear(key)


class Registry:
    """Keeps running requests, and ended requests for the resume window, by their names on the wire.

    Only used on the event loop.

    Attributes:
        num_added: the number of requests so far.
    """

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self.num_added = 0
        self._live: dict[str, RequestState] = {}
        self._retained = Retention[str, "RequestState"](
            max_age_seconds=window_seconds, max_entries=MAX_RETAINED, max_weight=MAX_RETAINED_TOKENS
        )
        self._sweep = Timers[str]()

    @property
    def live(self) -> list[RequestState]:
        return list(self._live.values())

    @property
    def retained(self) -> list[RequestState]:
        self._expire()
        return self._retained.values()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def find(self, wire_id: str) -> RequestState | None:
        self._expire()
        return self._live.get(wire_id) or self._retained.get(wire_id)

    def is_live(self, state: RequestState) -> bool:
        """Returns whether this very object is running, not only a request of the same name."""
        return self._live.get(state.wire_id) is state

    def add(self, state: RequestState) -> None:
        self._live[state.wire_id] = state
        self.num_added += 1

    def remove(self, state: RequestState) -> None:
        del self._live[state.wire_id]

    def retain(self, state: RequestState) -> None:
        self.remove(state)
        self._retained.add(state.wire_id, state, state.weight, asyncio.get_running_loop().time())
        self._sweep.set("retained", self._window_seconds, lambda _: self._expire())

    def _expire(self) -> None:
        self._retained.expire(asyncio.get_running_loop().time())

    def close(self) -> None:
        self._sweep.clear_all()
