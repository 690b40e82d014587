"""Decides which LoRA adapters are in a replica's slots, and which of them must leave for one that waits.

A step computes sequences of at most as many adapters as there are slots. Sequences without an adapter, and those whose
adapter is in a slot, pass one that waits for a slot. They must not pass it for ever: once an adapter has waited longer
than the patience, the adapter in a slot that will be done first is *drained*, and none of its sequences begins until
the slot is given away. Knows no blocks and no rows.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import takewhile
from typing import TYPE_CHECKING

from scheduler_service.core.config import LoraRoom

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.queues.queues import Queues
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.step import StepBuilder


class _Slot:
    """A slot of the worker: the adapter in it (0: none), and when it was put there."""

    __slots__ = ("lora_id", "since")

    def __init__(self) -> None:
        self.lora_id = 0
        self.since = 0.0


class LoraSlots:
    """The slots of one replica, and the adapters that wait for one.

    An adapter with p others waiting before it begins within (1 + p // slots) times the sum of the patience and the
    longest run of a sequence: an adapter is not drained before it has been in its slot for the time of the patience.

    `passed_seconds`: for each adapter's name, how long it has waited for slots while others began.
    """

    __slots__ = ("_claims", "_now", "_patience", "_queues", "_remaining", "_slots", "_waiting", "passed_seconds")

    def __init__(self, num_slots: int, patience_seconds: float, queues: Queues) -> None:
        self._slots = [_Slot() for _ in range(num_slots)]
        self._patience = patience_seconds
        self._queues = queues
        self._now = 0.0
        # For each adapter of running and swapped sequences, the most tokens that one may still get; None: unknown.
        self._remaining: dict[int, int] | None = None
        # When each waiting adapter began to wait.
        self._waiting: dict[int, float] = {}
        # Adapters that have waited too long, in this order, and the adapter that is drained for each.
        self._claims: dict[int, int] = {}
        self.passed_seconds = defaultdict[str, float](float)

    def begin_step(self, now: float) -> None:
        """Forgets adapters that no longer wait. `now`: seconds of any steady clock."""
        self._now = now
        self.recount()
        if self._waiting:
            there = {_lora_id(sequence) for sequence in self._queues.waiting}
            for lora_id in self._waiting.keys() - there:
                self._stop_waiting(lora_id)

    def recount(self) -> None:
        """Counts the running adapters anew: sequences were preempted within the step."""
        self._remaining = None

    def clear(self) -> None:
        """Empties all slots: another worker process has taken over."""
        for slot in self._slots:
            slot.lora_id = 0
        self._waiting.clear()
        self._claims.clear()
        self.recount()

    # Sequences that may begin.

    def may_start(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence has no adapter, or one that is in a slot or may take one. Otherwise it waits.

        A preempted sequence does not wait for other adapters.
        """
        lora_id = _lora_id(sequence)
        if not lora_id:
            return True
        has_begun = sequence.is_known or sequence.group.num_outputs > 0
        is_open = self._find(lora_id) is not None and (has_begun or not self._is_drained(lora_id))
        if is_open or self._count_free(lora_id, has_begun=has_begun) > 0:
            return True
        self._wait(lora_id)
        return False

    def _is_drained(self, lora_id: int) -> bool:
        return lora_id in self._claims.values()

    def _count_free(self, lora_id: int, *, has_begun: bool = False) -> int:
        """Counts the unused slots, less one for each adapter that has claimed one before this adapter."""
        num_free = sum(slot.lora_id not in self._in_use for slot in self._slots)
        return num_free if has_begun else num_free - sum(1 for _ in takewhile(lora_id.__ne__, self._claims))

    @property
    def _in_use(self) -> dict[int, int]:
        if self._remaining is None:
            remaining: dict[int, int] = {}
            for queue in (self._queues.running, self._queues.swapped):
                for sequence in queue:
                    if lora_id := _lora_id(sequence):
                        left = sequence.max_length - len(sequence.token_ids)
                        remaining[lora_id] = max(remaining.get(lora_id, 0), left)
            self._remaining = remaining
        return self._remaining

    def _wait(self, lora_id: int) -> None:
        since = self._waiting.setdefault(lora_id, self._now)
        is_served = self._find(self._claims.get(lora_id, 0)) is not None
        if self._now - since < self._patience or is_served:
            return
        self._claims.pop(lora_id, None)
        drained = self._claims.values()
        settled = [slot for slot in self._slots if slot.since + self._patience <= self._now]
        candidates = [slot.lora_id for slot in settled if slot.lora_id in self._in_use and slot.lora_id not in drained]
        if candidates:
            self._claims[lora_id] = min(candidates, key=self._in_use.__getitem__)

    # A sequence begins.

    def start(self, sequence: Sequence, step: StepBuilder) -> None:
        """Gives a starting sequence's adapter a slot, unless it has one. `may_start` was true for it."""
        lora_id = _lora_id(sequence)
        if not lora_id:
            return
        if self._find(lora_id) is None:
            slot = self._choose()
            place = self._slots[slot]
            place.lora_id, place.since = lora_id, self._now
            step.activated_loras.append((slot, lora_id))
        if lora_id in self._waiting:
            lora = sequence.group.spec.lora
            self.passed_seconds[lora.name if lora else ""] += self._now - self._waiting[lora_id]
            self._stop_waiting(lora_id)
        self._in_use[lora_id] = max(self._in_use.get(lora_id, 0), sequence.max_length - len(sequence.token_ids))

    def _choose(self) -> int:
        """Chooses an empty slot, or else the unused one whose adapter came first."""
        free = [number for number, slot in enumerate(self._slots) if slot.lora_id not in self._in_use]
        return min(free, key=lambda number: (self._slots[number].lora_id != 0, self._slots[number].since))

    def _stop_waiting(self, lora_id: int) -> None:
        del self._waiting[lora_id]
        self._claims.pop(lora_id, None)

    def _find(self, lora_id: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.lora_id == lora_id), None) if lora_id else None

    # For others.

    def find_room(self) -> LoraRoom:
        """Finds which adapters new sequences may have here."""
        self.recount()
        resident = self.resident_ids
        num_empty = len(self._slots) - len(resident)
        return LoraRoom(set(resident) - set(self._claims.values()), max(self._count_free(0), 0), num_empty)

    @property
    def resident_ids(self) -> list[int]:
        return [slot.lora_id for slot in self._slots if slot.lora_id]

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless each of these sequences has its adapter in one slot."""
        resident = self.resident_ids
        assert len(set(resident)) == len(resident), "an adapter is in two slots"
        lost = [sequence for sequence in sequences if _lora_id(sequence) not in (0, *resident)]
        assert not lost, f"{lost} run without their adapters"


def _lora_id(sequence: Sequence) -> int:
    return sequence.group.spec.lora_id
