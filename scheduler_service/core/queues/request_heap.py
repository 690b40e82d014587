"""A heap of requests that wait, from which any of them can be removed. Knows nothing of tenants, limits and time."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_service.core.sequence import Group

MIN_HEAP_TO_SWEEP = 16
"""A heap with fewer entries keeps its removed ones until they come up."""


class Entry:
    """A request's place in a heap; without its group once it is removed."""

    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        self.group: Group | None = group


class RequestHeap:
    """Waiting requests by (key, number). `push` and `remove` take O(log n) time, amortized over the removals.

    `num_served` (tokens) and `last_turn` are for who shares a machine among several heaps.
    """

    __slots__ = ("_places", "last_turn", "num_served", "num_waiting")

    def __init__(self, num_served: int = 0) -> None:
        self.num_served = num_served
        self.last_turn = 0
        self.num_waiting = 0
        # Removed entries are among them, but the first is never one.
        self._places: list[tuple[float, int, Entry]] = []

    def push(self, key: float, number: int, entry: Entry) -> None:
        """Adds a request, behind those whose key and number are less."""
        heappush(self._places, (key, number, entry))
        self.num_waiting += 1

    @property
    def first(self) -> Group | None:
        """The request with the least key and number; None if none waits."""
        return self._places[0][2].group if self._places else None

    @property
    def first_key(self) -> tuple[float, int]:
        """The least key and number. Raises IndexError if no request waits."""
        key, number, _ = self._places[0]
        return key, number

    def remove(self, entry: Entry) -> None:
        entry.group = None
        self.num_waiting -= 1
        places = self._places
        while places and places[0][2].group is None:
            heappop(places)
        # Linear, but only after as many removals.
        if len(places) > max(2 * self.num_waiting, MIN_HEAP_TO_SWEEP):
            self._places = [place for place in places if place[2].group]
            heapify(self._places)
