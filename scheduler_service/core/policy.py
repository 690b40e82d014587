"""Who comes first, and who must go. Owns the queues and the rows; knows nothing of blocks and steps."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from scheduler_service.core.sequence import SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler_service.core.sequence import Sequence

MAX_REFUSED = 8
"""Waiting sequences that one step tries in vain before it stops."""

MAX_OVERTAKES = 64
"""Sequences that may be admitted before the first of the queue; then the others wait with it."""


class WaitingQueue:
    """First come, first served, with bounded skip-ahead. All but `replace` takes constant time."""

    __slots__ = ("_num_overtakes", "_overtaken", "_queue")

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Sequence] = OrderedDict()
        self._overtaken: Sequence | None = None
        self._num_overtakes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue.values())

    def push(self, sequence: Sequence) -> None:
        """Last."""
        self._queue[sequence.sequence_id] = sequence

    def push_front(self, sequence: Sequence) -> None:
        """First."""
        self._queue[sequence.sequence_id] = sequence
        self._queue.move_to_end(sequence.sequence_id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """From wherever it stands."""
        del self._queue[sequence.sequence_id]

    def replace(self, old: Sequence, new: Sequence) -> None:
        """Another in its place."""
        order = [new if sequence is old else sequence for sequence in self._queue.values()]
        self._queue = OrderedDict((sequence.sequence_id, sequence) for sequence in order)

    def clear(self) -> None:
        """Nobody waits."""
        self._queue.clear()
        self._overtaken = None

    def peek(self, num_refused: int) -> Sequence | None:
        """The one to try now that so many before it could not be admitted. None: nobody may."""
        if num_refused > MAX_REFUSED or (num_refused and self._is_patience_over()):
            return None
        return next(islice(self._queue.values(), num_refused, None), None)

    def take(self, sequence: Sequence, num_refused: int) -> None:
        """It is admitted, before so many others."""
        self.remove(sequence)
        if num_refused:
            first = next(iter(self._queue.values()))
            self._num_overtakes = self._num_overtakes + 1 if first is self._overtaken else 1
            self._overtaken = first

    def _is_patience_over(self) -> bool:
        return self._num_overtakes >= MAX_OVERTAKES and next(iter(self._queue.values())) is self._overtaken


class Queues:
    """Where each live sequence stands, but for children that are not forked yet.

    `running` is in order of precedence: the last one is the first victim. `prefilling` are those of it that have more
    than one token to compute. A group takes all its rows when its leader starts, for else two groups could each hold
    the rows that the other one needs for its forks.
    """

    __slots__ = ("_has_ended", "_swapped_before", "max_rows", "num_rows", "prefilling", "running", "swapped", "waiting")

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.num_rows = 0
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self._has_ended = False
        self._swapped_before = 0

    def begin_step(self) -> None:
        """Drop what ended from the running ones, all at once."""
        self._swapped_before = len(self.swapped)
        if self._has_ended:
            self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]
            self._has_ended = False

    @property
    def num_running(self) -> int:
        """Running sequences."""
        if not self._has_ended:
            return len(self.running)
        return sum(sequence.status is SequenceStatus.RUNNING for sequence in self.running)

    def has_rows(self, sequence: Sequence) -> bool:
        """Whether its group's rows are free."""
        return self.num_rows + sequence.group.num_rows <= self.max_rows

    def start(self, sequence: Sequence) -> None:
        """It left its queue and runs, after all others."""
        sequence.status = SequenceStatus.RUNNING
        self.num_rows += sequence.group.num_rows
        self.running.append(sequence)
        if sequence.is_prefilling:
            self.prefilling.append(sequence)

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """The children run beside their parent, in rows that it kept for them."""
        place = self.running.index(parent) + 1
        self.running[place:place] = children
        for child in children:
            child.status = SequenceStatus.RUNNING

    def take_victim(self) -> Sequence:
        """The last of the running ones, which runs no more."""
        victim = self.running.pop()
        self._free_rows(victim)
        return victim

    def swap_out(self, victim: Sequence) -> None:
        """It waits for device blocks, behind those of earlier steps and before younger victims of this one."""
        victim.status = SequenceStatus.SWAPPED
        self.swapped.insert(self._swapped_before, victim)

    def start_over(self, victim: Sequence) -> None:
        """It waits before all others."""
        victim.status = SequenceStatus.WAITING
        self.waiting.push_front(victim)

    def remove(self, sequence: Sequence) -> None:
        """It ended. Its status still says where it stands."""
        if sequence.status is SequenceStatus.RUNNING:
            self._free_rows(sequence)
            self._has_ended = True
        elif sequence.status is SequenceStatus.SWAPPED:
            self.swapped.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def drop_child(self, child: Sequence) -> None:
        """A child that is not forked yet ended: its row is free, if its leader holds it."""
        group = child.group
        if group.leader.status is SequenceStatus.RUNNING:
            self.num_rows -= 1
        group.unforked.remove(child)

    def replace_leader(self, leader: Sequence) -> None:
        """A leader ended before its children were forked: the first of them begins in its place, from nothing."""
        group = leader.group
        successor = group.unforked[0]
        successor.token_ids = list(group.spec.prompt_token_ids)
        if leader.status is SequenceStatus.WAITING:
            self.waiting.replace(leader, successor)
        else:
            self.remove(leader)
            self.waiting.push_front(successor)
        del group.unforked[0]

    def _free_rows(self, sequence: Sequence) -> None:
        self.num_rows -= sequence.group.num_rows
        if sequence.is_prefilling:
            self.prefilling.remove(sequence)

    def take_all(self) -> list[Sequence]:
        """Everybody, in order of precedence: who runs, who is swapped out, who waits. Nobody is left."""
        self.begin_step()
        everybody = [*self.running, *self.swapped, *self.waiting]
        self.num_rows = 0
        self.waiting.clear()
        self.running.clear()
        self.prefilling.clear()
        self.swapped.clear()
        return everybody
