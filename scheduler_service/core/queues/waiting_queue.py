"""Sequences that wait at one replica, in the order in which they are tried. Knows nothing of rows, blocks and steps."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Many

    from scheduler_service.core.sequence import Sequence

    _Entry = tuple[float, int, Sequence]
    """Rank, number, sequence. Numbers differ, so sequences are never compared."""

MAX_REFUSED = 8
"""How many waiting sequences a step tries without success before it stops."""

MAX_OVERTAKES = 64
"""How many sequences may be admitted before the first of the queue; then all wait behind it."""


class WaitingQueue:
    """Waiting sequences in a fixed order, with bounded skip-ahead.

    The order is first come, first served; or, with `aging_seconds`, the time of arrival plus that many seconds for each
    level of priority. A step sorts nothing: a sequence gets its place by bisection and keeps it.

    `_lines` has the same entries for each tenant and priority apart, and `_heads` the first entry of each, in order.
    """

    __slots__ = (
        "_aging_seconds",
        "_entries",
        "_first",
        "_heads",
        "_last",
        "_lines",
        "_num_overtakes",
        "_overtaken",
        "_places",
    )

    def __init__(self, aging_seconds: float | None = None) -> None:
        self._aging_seconds = aging_seconds
        self._entries: list[_Entry] = []
        self._places: dict[int, _Entry] = {}
        self._lines: dict[tuple[str, int], list[_Entry]] = {}
        self._heads: list[_Entry] = []
        self._first = self._last = 0
        self._overtaken: Sequence | None = None
        self._num_overtakes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry[2] for entry in self._entries)

    @property
    def ranks(self) -> bool:
        """Whether priorities count."""
        return self._aging_seconds is not None

    def rank(self, sequence: Sequence) -> float:
        """Returns the first key of the order; 0 for all sequences if it is first come, first served."""
        if self._aging_seconds is None:
            return 0.0
        return sequence.group.arrived_at + sequence.priority * self._aging_seconds

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence as the last of its rank."""
        self._last += 1
        self._insert((self.rank(sequence), self._last, sequence))

    def push_front(self, sequence: Sequence) -> None:
        """Adds a sequence as the first of its rank."""
        self._first -= 1
        self._insert((self.rank(sequence), self._first, sequence))

    def _insert(self, entry: _Entry) -> None:
        insort(self._entries, entry)
        self._places[entry[2].sequence_id] = entry
        line = self._lines.setdefault(self._line_of(entry[2]), [])
        if line and entry < line[0]:
            _delete(self._heads, line[0])
        insort(line, entry)
        if line[0] is entry:
            insort(self._heads, entry)

    def remove(self, sequence: Sequence) -> None:
        entry = self._places.pop(sequence.sequence_id)
        _delete(self._entries, entry)
        name = self._line_of(sequence)
        line = self._lines[name]
        if line[0] is entry:
            _delete(self._heads, entry)
            if len(line) > 1:
                insort(self._heads, line[1])
        _delete(line, entry)
        if not line:
            del self._lines[name]

    def _line_of(self, sequence: Sequence) -> tuple[str, int]:
        return sequence.group.spec.tenant, sequence.priority if self.ranks else 0

    @property
    def heads(self) -> Iterator[Sequence]:
        """The first of each tenant and priority, in order."""
        return (entry[2] for entry in self._heads)

    def replace(self, old: Sequence, new: Sequence) -> None:
        rank, number, _ = self._places[old.sequence_id]
        self.remove(old)
        self._insert((rank, number, new))

    def clear(self) -> None:
        self._entries.clear()
        self._places.clear()
        self._lines.clear()
        self._heads.clear()
        self._overtaken = None

    def peek(self, place: int, refused: Many[Sequence] = ()) -> Sequence | None:
        """Returns the sequence at a place, after `refused` could not be admitted; None: no more may be tried."""
        if len(refused) > MAX_REFUSED or (refused and self._is_patience_over(refused[0])):
            return None
        return self._entries[place][2] if place < len(self._entries) else None

    def take(self, sequence: Sequence, refused: Many[Sequence] = ()) -> None:
        """Removes a sequence that is admitted before those that were refused."""
        self.remove(sequence)
        if refused:
            first = refused[0]
            self._num_overtakes = self._num_overtakes + 1 if first is self._overtaken else 1
            self._overtaken = first

    def _is_patience_over(self, first: Sequence) -> bool:
        return self._num_overtakes >= MAX_OVERTAKES and first is self._overtaken


def _delete(entries: list[_Entry], entry: _Entry) -> None:
    del entries[bisect_left(entries, entry)]
