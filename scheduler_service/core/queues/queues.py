"""Orders a replica's sequences by precedence. Owns the queues and the rows; knows nothing of blocks and steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from typing import TYPE_CHECKING

from scheduler_service.core.queues.waiting_queue import MAX_REFUSED, WaitingQueue
from scheduler_service.core.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


FEW_TENANTS = 4
"""Up to this many tenants may have to give up all that they run, if it is more than a share. With more tenants each
keeps its share: otherwise those that wait would take from those that run, in turn and for ever."""


class Queues:
    """Holds every live sequence in its queue, except children that are not forked yet.

    `running` is in order of precedence: by priority (unless the policy is first come, first served), then by start.
    `prefilling` has the running sequences with more than one token to compute. A group takes all its rows when its
    leader starts: otherwise two groups could each hold the rows that the other needs for its forks. `num_beams` counts
    the running beams.
    """

    __slots__ = (
        "_has_ended",
        "_rows_of_tenant",
        "_swapped_now",
        "max_rows",
        "num_beams",
        "num_rows",
        "prefilling",
        "running",
        "swapped",
        "tenant_shares",
        "waiting",
    )

    def __init__(self, max_rows: int, aging_seconds: float | None = None) -> None:
        self.max_rows = max_rows
        self.num_rows = 0
        self.num_beams = 0
        # A tenant without rows is not among them.
        self._rows_of_tenant = Counter[str]()
        self.tenant_shares = TenantShares(self._rows_of_tenant, max_rows)
        self.waiting = WaitingQueue(aging_seconds)
        self.running: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self._has_ended = False
        self._swapped_now: set[Sequence] = set()

    def begin_step(self) -> None:
        """Drops sequences that ended from `running`, all at once."""
        self._swapped_now.clear()
        if self._has_ended:
            self.running = [s for s in self.running if s.status is SequenceStatus.RUNNING]
            self._has_ended = False

    @property
    def num_running(self) -> int:
        if not self._has_ended:
            return len(self.running)
        return sum(sequence.status is SequenceStatus.RUNNING for sequence in self.running)

    def has_rows(self, sequence: Sequence) -> bool:
        """Whether the rows for the sequence's whole group are free."""
        return self.num_rows + sequence.group.num_rows <= self.max_rows

    def start(self, sequence: Sequence) -> None:
        """Puts a sequence that left its queue into `running`, after all others of its class."""
        sequence.status = SequenceStatus.RUNNING
        self._count_rows(sequence, sequence.group.num_rows)
        self.num_beams += sequence.group.beams is not None
        insort(self.running, sequence, key=self._class)
        if sequence.is_prefilling:
            insort(self.prefilling, sequence, key=self._prefill_key)

    def fork(self, parent: Sequence, children: list[Sequence]) -> None:
        """Puts children beside their parent, in rows that it kept for them."""
        place = self.running.index(parent) + 1
        self.running[place:place] = children
        for child in children:
            child.status = SequenceStatus.RUNNING

    def split_rows(self, leader: Sequence) -> None:
        """Frees the rows that a leader held for all beams but one: from now on each beam has its own."""
        if leader.status is SequenceStatus.RUNNING:
            self._count_rows(leader, 1 - leader.group.num_rows)

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Puts another beam beside its parent."""
        self.fork(parent, [child])
        self._count_rows(child, 1)
        self.num_beams += 1

    def _prefill_key(self, sequence: Sequence) -> tuple[int, bool, int]:
        """Orders by class, then sequences that hurry (shortest first), then the others by start."""
        num_left = len(sequence.token_ids) - sequence.num_scheduled
        return self._class(sequence), not sequence.hurries, num_left if sequence.hurries else 0

    # Preemption

    def _class(self, sequence: Sequence) -> int:
        return sequence.priority if self.waiting.ranks else 0

    def _count_rows(self, sequence: Sequence, change: int) -> None:
        self.num_rows += change
        tenant, rows_of_tenant = sequence.group.spec.tenant, self._rows_of_tenant
        rows_of_tenant[tenant] += change
        if not rows_of_tenant[tenant]:
            del rows_of_tenant[tenant]

    def outranks(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether the other sequence has a lower priority, and is not so old that it comes first anyway."""
        rank = self.waiting.rank
        return self._class(sequence) < self._class(other) and rank(sequence) < rank(other)

    def is_urgent(self, sequence: Sequence) -> bool:
        """Whether a running sequence would be preempted for this one, or a swapped one has lower precedence."""
        may_have_some = self.has_none(sequence) and self.tenant_shares.may_be_taken
        if may_have_some and any(self.gives_way_to(other, sequence) for other in self.running):
            return True
        own = self._class(sequence)
        if not any(queue and own < self._class(queue[-1]) for queue in (self.running, self.swapped)):
            return False
        return any(self.outranks(sequence, other) for queue in (self.running, self.swapped) for other in queue)

    def find_urgent(self, refused: Collection[Sequence] = ()) -> Sequence | None:
        """Finds the first urgent sequence among the heads of all tenants and priorities, leaving out `refused`."""
        num_tried = 0
        may_take = self.waiting.ranks or len(self._rows_of_tenant) < 2 or self.tenant_shares.may_be_taken
        if not may_take:
            return None
        for sequence in self.waiting.heads:
            if sequence in refused:
                continue
            if self.is_urgent(sequence):
                return sequence
            num_tried += self.has_none(sequence)
            if num_tried > MAX_REFUSED:
                return None
        return None

    def find_all_urgent(self) -> set[Sequence]:
        """Finds all urgent sequences, up to as many as one step tries."""
        found: set[Sequence] = set()
        while len(found) <= MAX_REFUSED and (sequence := self.find_urgent(found)) is not None:
            found.add(sequence)
        return found

    def has_none(self, sequence: Sequence) -> bool:
        """Whether the sequence's tenant has no row while others have some."""
        return bool(self._rows_of_tenant) and sequence.group.spec.tenant not in self._rows_of_tenant

    def gives_way_to(self, other: Sequence, sequence: Sequence) -> bool:
        """Whether another may be preempted for a sequence whose tenant has no row.

        It may if its priority is not higher, and it did not begin at the expense of others itself.
        """
        return self._class(sequence) <= self._class(other) and not other.hurries

    def find_behind(self, sequence: Sequence, step_id: int) -> list[Sequence]:
        """Finds the victims for a running sequence: the lowest class behind it that is not in this step."""
        behind = self.running[self.running.index(sequence) + 1 :]
        return self.find_lowest([other for other in behind if other.last_step_id != step_id and not other.hurries])

    def find_below(self, sequence: Sequence, step_id: int = 0) -> list[Sequence]:
        """Finds the running sequences that may be preempted for a waiting one, except those of this step.

        These are all that it outranks and, if its tenant has no row, the last ones of tenants with more than their
        share, unless they have a higher priority.
        """
        excess = self.tenant_shares.count_excess() if self.has_none(sequence) else {}
        found: list[Sequence] = []
        for other in reversed(self.running):
            tenant, num_rows = other.group.spec.tenant, other.group.num_rows
            if other.last_step_id == step_id:
                continue
            has_excess = excess.get(tenant, 0) >= num_rows and self.gives_way_to(other, sequence)
            if has_excess or self.outranks(sequence, other):
                excess[tenant] = excess.get(tenant, 0) - num_rows
                found.append(other)
        return found[::-1]

    def find_swapped_below(self, sequence: Sequence) -> list[Sequence]:
        """Finds the swapped sequences whose blocks may be taken: victims of this step, and those outranked."""
        return [other for other in self.swapped if other in self._swapped_now or self.outranks(sequence, other)]

    def find_lowest(self, sequences: list[Sequence]) -> list[Sequence]:
        """Returns those sequences that have the class of the last one; `sequences` are in order."""
        return [other for other in sequences if self._class(other) == self._class(sequences[-1])]

    def take_victim(self, victim: Sequence) -> None:
        self.running.remove(victim)
        self._free_rows(victim)

    def swap_out(self, victim: Sequence) -> None:
        """Inserts a victim into `swapped`: after earlier steps' victims of its class, before this step's."""
        victim.status = SequenceStatus.SWAPPED
        first = bisect_left(self.swapped, self._class(victim), key=self._class)
        place = bisect_right(self.swapped, self._class(victim), key=self._class)
        while place > first and self.swapped[place - 1] in self._swapped_now:
            place -= 1
        self.swapped.insert(place, victim)
        self._swapped_now.add(victim)

    def start_over(self, victim: Sequence) -> None:
        """Puts a victim into `waiting`, before all others of its rank."""
        victim.status = SequenceStatus.WAITING
        self.waiting.push_front(victim)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ended from the queue that its status still names."""
        if sequence.status is SequenceStatus.RUNNING:
            self._free_rows(sequence)
            self._has_ended = True
        elif sequence.status is SequenceStatus.SWAPPED:
            self.swapped.remove(sequence)
        elif sequence.status is SequenceStatus.WAITING:
            self.waiting.remove(sequence)

    def drop_child(self, child: Sequence) -> None:
        """Removes a child that ended before it was forked; frees its row if its leader holds it."""
        group = child.group
        if group.leader.status is SequenceStatus.RUNNING:
            self._count_rows(child, -1)
        group.unforked.remove(child)

    def begin_alone(self, child: Sequence) -> None:
        """Queues a child that cannot be forked, to be prefilled by itself, and frees the row that its leader holds."""
        self._count_rows(child, -1)
        child.token_ids = list(child.group.spec.prompt_token_ids)
        self.start_over(child)

    def replace_leader(self, leader: Sequence) -> None:
        """Replaces a leader that ended before its children were forked: the first of them begins anew."""
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
        self._count_rows(sequence, -sequence.group.num_rows)
        self.num_beams -= sequence.group.beams is not None
        sequence.hurries = False
        if sequence.is_prefilling:
            self.prefilling.remove(sequence)

    def take_all(self) -> list[Sequence]:
        """Empties the queues. Returns all sequences in order of precedence: running, swapped, waiting."""
        self.begin_step()
        everybody = [*self.running, *self.swapped, *self.waiting]
        self.num_rows = self.num_beams = 0
        self._rows_of_tenant.clear()
        self.waiting.clear()
        self.running.clear()
        self.prefilling.clear()
        self.swapped.clear()
        return everybody


class TenantShares:
    """Compares the rows of each tenant with its share. `rows_of_tenant` has no tenant without rows, and may change."""

    __slots__ = ("_max_rows", "_rows_of_tenant")

    def __init__(self, rows_of_tenant: Mapping[str, int], max_rows: int) -> None:
        self._rows_of_tenant = rows_of_tenant
        self._max_rows = max_rows

    @property
    def num_tenants(self) -> int:
        """Tenants that have rows."""
        return len(self._rows_of_tenant)

    @property
    def has_few_tenants(self) -> bool:
        """Whether so few tenants have all the rows that others would starve rather than queue."""
        return len(self._rows_of_tenant) <= FEW_TENANTS

    @property
    def share(self) -> int:
        return max(self._max_rows // (len(self._rows_of_tenant) + 1), 1)

    @property
    def may_be_taken(self) -> bool:
        """Whether some tenant may have to give up some of its rows."""
        share = self.share
        return self.has_few_tenants or any(num_rows > share for num_rows in self._rows_of_tenant.values())

    def find_over_share(self) -> list[str]:
        return [tenant for tenant, num_excess in self.count_excess().items() if num_excess > 0]

    def count_excess(self) -> dict[str, int]:
        """Returns for each tenant its rows beyond a share; negative if it has fewer."""
        share = self.share
        return {tenant: num_rows - share for tenant, num_rows in self._rows_of_tenant.items()}
