"""Keeps requests by name while they run, and for a while after they have ended whole."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from blockyard.retention import Retention
from gateway.live.timers import Timers

if TYPE_CHECKING:
    from gateway.live.request_state import RequestState

MAX_RETAINED = 10_000
MAX_RETAINED_TOKENS = 64 * 2**20


class Registry:
    """Keeps requests by their names on the wire, and whole answers for the resume window. Runs on the loop."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._live: dict[str, RequestState] = {}
        self._retained = Retention[str, "RequestState"](
            max_age_seconds=window_seconds, max_entries=MAX_RETAINED, max_weight=MAX_RETAINED_TOKENS
        )
        self._sweep = Timers[str]()

    @property
    def live(self) -> list[RequestState]:
        """The running requests."""
        return list(self._live.values())

    @property
    def retained(self) -> list[RequestState]:
        """The requests that have ended."""
        self._expire()
        return self._retained.values()

    @property
    def num_live(self) -> int:
        """The number of running requests."""
        return len(self._live)

    def find(self, wire_id: str) -> RequestState | None:
        """Returns the request of this name, running or retained."""
        self._expire()
        return self._live.get(wire_id) or self._retained.get(wire_id)

    def is_live(self, state: RequestState) -> bool:
        """Returns whether this very request runs."""
        return self._live.get(state.wire_id) is state

    def add(self, state: RequestState) -> None:
        """Adds a running request."""
        self._live[state.wire_id] = state

    def remove(self, state: RequestState) -> None:
        """Removes a running request."""
        del self._live[state.wire_id]

    def retain(self, state: RequestState) -> None:
        """Moves a running request to the retained ones."""
        self.remove(state)
        self._retained.add(state.wire_id, state, state.weight, asyncio.get_running_loop().time())
        self._sweep.set("retained", self._window_seconds, lambda _: self._expire())

    def _expire(self) -> None:
        self._retained.expire(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Stops its timer."""
        self._sweep.clear_all()
