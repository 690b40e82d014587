"""Which requests this gateway knows by name: those that run, and for a while those that have ended whole."""

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
    """Requests by their names on the wire. An answer that is whole is kept for the window. Runs on the loop."""

    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._live: dict[str, RequestState] = {}
        self._retained = Retention[str, "RequestState"](
            max_age_seconds=window_seconds, max_entries=MAX_RETAINED, max_weight=MAX_RETAINED_TOKENS
        )
        self._sweep = Timers[str]()

    @property
    def live(self) -> list[RequestState]:
        """Those that run."""
        return list(self._live.values())

    @property
    def retained(self) -> list[RequestState]:
        """Those that have ended."""
        self._expire()
        return self._retained.values()

    @property
    def num_live(self) -> int:
        """How many run."""
        return len(self._live)

    def find(self, wire_id: str) -> RequestState | None:
        """The request of this name."""
        self._expire()
        return self._live.get(wire_id) or self._retained.get(wire_id)

    def is_live(self, state: RequestState) -> bool:
        """Whether this very request runs."""
        return self._live.get(state.wire_id) is state

    def add(self, state: RequestState) -> None:
        """Takes one that runs."""
        self._live[state.wire_id] = state

    def remove(self, state: RequestState) -> None:
        """Forgets one that runs."""
        del self._live[state.wire_id]

    def retain(self, state: RequestState) -> None:
        """Keeps one that ran."""
        self.remove(state)
        self._retained.add(state.wire_id, state, state.weight, asyncio.get_running_loop().time())
        self._sweep.set("retained", self._window_seconds, lambda _: self._expire())

    def _expire(self) -> None:
        self._retained.expire(asyncio.get_running_loop().time())

    def close(self) -> None:
        """Waits for nothing any more."""
        self._sweep.clear_all()
