"""The requests of one tenant that wait, a line for each adapter. Knows nothing of tenants, limits and time.

Lines share by tokens, as tenants do: the next request is the first of the line that was served least, so that a flood
of requests with one adapter, or with none, keeps no other waiting. Served is what an adapter got while requests of the
tenant waited, of prompts and of outputs; it is remembered while others of the tenant wait. With priorities the first of
all lines is next.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from scheduler_service.core.sequence import Group

MIN_HEAP_TO_SWEEP = 16
"""A heap with fewer entries keeps its dead ones until they come up."""

MAX_ABSENT_ADAPTERS = 256
"""Adapters remembered for what they owe though none of their requests waits; who left first is forgiven first."""


class Entry:
    """A place in a line; dead without its group."""

    __slots__ = ("group",)

    def __init__(self, group: Group) -> None:
        self.group: Group | None = group


class _Line:
    """What waits with one adapter. `heap`: (key, number of arrival, entry), dead ones among them, never the first."""

    __slots__ = ("heap", "last_turn", "num_served", "num_waiting")

    def __init__(self, num_served: int) -> None:
        self.num_served = num_served
        self.last_turn = 0
        self.num_waiting = 0
        self.heap: list[tuple[float, int, Entry]] = []

    def drop_dead(self) -> None:
        """Let a live entry be first, and most entries live. Linear only after as many removals."""
        while self.heap and self.heap[0][2].group is None:
            heappop(self.heap)
        if len(self.heap) > max(2 * self.num_waiting, MIN_HEAP_TO_SWEEP):
            self.heap = [place for place in self.heap if place[2].group]
            heapify(self.heap)


class AdapterLines:
    """The lines of one tenant. An operation takes O(log n) time, and O(1) for each adapter that waits."""

    __slots__ = ("_by_key", "_lines", "_owed", "num_waiting")

    def __init__(self, *, by_key: bool) -> None:
        self._by_key = by_key
        self._lines: dict[int, _Line] = {}
        # Tokens that adapters got of which nothing waits, while others wait.
        self._owed = OrderedDict[int, int]()
        self.num_waiting = 0

    def push(self, key: float, number: int, entry: Entry) -> None:
        """Adds a request, behind those of its adapter whose key and number are less."""
        assert entry.group
        lora_id = entry.group.spec.lora_id
        line = self._lines.get(lora_id)
        if line is None:
            line = self._lines[lora_id] = _Line(max(self._owed.pop(lora_id, 0), self._find_virtual_time()))
        heappush(line.heap, (key, number, entry))
        line.num_waiting += 1
        self.num_waiting += 1

    def _find_virtual_time(self) -> int:
        return min((line.num_served for line in self._lines.values()), default=0)

    def find(self, passed: Collection[int] = ()) -> Group | None:
        """Finds the next request, leaving out adapters that are to be passed (0: requests without one)."""
        lines = [line for lora_id, line in self._lines.items() if lora_id not in passed]
        return min(lines, key=self._order).heap[0][2].group if lines else None

    def _order(self, line: _Line) -> tuple[float, float]:
        key, number, _ = line.heap[0]
        return (key, number) if self._by_key else (line.num_served, line.last_turn)

    def serve(self, group: Group, turn: int) -> None:
        """Charges a request's adapter for its prompt. `turn`: more than that of any before."""
        line = self._lines[group.spec.lora_id]
        line.num_served += group.prompt_length
        line.last_turn = turn

    def charge(self, lora_id: int, num_tokens: int) -> None:
        """Charges an adapter for tokens that its running requests got, if any of the tenant waits."""
        if line := self._lines.get(lora_id):
            line.num_served += num_tokens
        elif self._lines:
            self._owe(lora_id, self._owed.get(lora_id, self._find_virtual_time()) + num_tokens)

    def _owe(self, lora_id: int, num_served: int) -> None:
        self._owed[lora_id] = num_served
        if len(self._owed) > MAX_ABSENT_ADAPTERS:
            self._owed.popitem(last=False)

    def remove(self, entry: Entry) -> None:
        """Removes a request from wherever it stands."""
        assert entry.group
        lora_id = entry.group.spec.lora_id
        entry.group = None
        self.num_waiting -= 1
        line = self._lines[lora_id]
        line.num_waiting -= 1
        line.drop_dead()
        if not line.num_waiting:
            del self._lines[lora_id]
            if self._lines:
                self._owe(lora_id, line.num_served)
            else:
                self._owed.clear()
