"""Deadlines by which requests must have begun or ended. Does not know what happens to those that are late."""

from __future__ import annotations

from enum import Enum
from heapq import heapify, heappop, heappush
from typing import NamedTuple

MIN_HEAP_TO_SWEEP = 64
"""A heap with fewer entries keeps its cancelled ones until they come up."""


class DeadlineKind(Enum):
    """What must have happened by a deadline. QUEUE: the request has begun. GENERATION: it has ended."""

    QUEUE = "queue"
    GENERATION = "generation"


class Deadline(NamedTuple):
    """A request's deadline of one kind."""

    request_id: str
    kind: DeadlineKind


class Deadlines:
    """A heap of times. Each operation takes O(log n) time, amortized over the cancelled ones."""

    __slots__ = ("_due", "_heap")

    def __init__(self) -> None:
        self._due: dict[Deadline, float] = {}
        self._heap: list[tuple[float, str, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def add(self, request_id: str, kind: DeadlineKind, at: float) -> None:
        """Sets a request's deadline of a kind: a later call replaces it."""
        self._due[Deadline(request_id, kind)] = at
        heappush(self._heap, (at, request_id, kind.value))
        self._sweep()

    def cancel(self, request_id: str, kind: DeadlineKind | None = None) -> None:
        """Removes one deadline of a request, or both if no kind is given. An unknown one is no error."""
        for one in DeadlineKind if kind is None else (kind,):
            self._due.pop(Deadline(request_id, one), None)
        self._sweep()

    def next_due(self) -> float | None:
        while self._heap and self._find_first() is None:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_expired(self, now: float) -> list[Deadline]:
        """Takes the deadlines that have passed, the earliest first."""
        late: list[Deadline] = []
        while self._heap and self._heap[0][0] <= now:
            deadline = self._find_first()
            heappop(self._heap)
            if deadline:
                del self._due[deadline]
                late.append(deadline)
        return late

    def _find_first(self) -> Deadline | None:
        """Returns the deadline of the heap's first entry; None if it was cancelled or replaced."""
        at, request_id, kind = self._heap[0]
        deadline = Deadline(request_id, DeadlineKind(kind))
        return deadline if self._due.get(deadline) == at else None

    def _sweep(self) -> None:
        if len(self._heap) > max(2 * len(self._due), MIN_HEAP_TO_SWEEP):
            self._heap = [(at, request_id, kind.value) for (request_id, kind), at in self._due.items()]
            heapify(self._heap)
