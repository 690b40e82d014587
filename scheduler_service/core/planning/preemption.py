"""Preempts sequences when blocks or rows run out: chooses the victim, and swaps it out or restarts it."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

from scheduler_service.core.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from scheduler_service.core.blocks.block_manager import BlockManager
    from scheduler_service.core.config import CoreConfig
    from scheduler_service.core.cost import CostModel
    from scheduler_service.core.queues.queues import Queues
    from scheduler_service.core.step import StepBuilder


class Preemption:
    """Takes blocks and rows from running sequences, but never from one that the step computes: its work would be lost.

    A victim's tokens in flight stay valid, and are appended when their answers come.
    """

    __slots__ = ("_blocks", "_config", "_costs", "_queues", "num_preemptions_total", "num_swaps_total")

    def __init__(self, config: CoreConfig, queues: Queues, blocks: BlockManager, costs: CostModel) -> None:
        self._config = config
        self._queues = queues
        self._blocks = blocks
        self._costs = costs
        self.num_preemptions_total = 0
        self.num_swaps_total = 0  # preemptions by swapping

    def count_on(self, predecessor: Preemption) -> None:
        """Continues the totals of the scheduler that this one replaces."""
        self.num_preemptions_total = predecessor.num_preemptions_total
        self.num_swaps_total = predecessor.num_swaps_total

    def preempt_one(self, candidates: list[Sequence], step: StepBuilder) -> None:
        """Preempts the candidate that the configured policy chooses."""
        self.preempt(self._choose(candidates), step)

    def _choose(self, candidates: list[Sequence]) -> Sequence:
        if self._config.victims == "last":
            return candidates[-1]
        return min(reversed(candidates), key=self._loss)

    def _loss(self, victim: Sequence) -> float:
        """Returns the seconds of work lost for each device block that preempting the victim frees."""
        num_freed = self._blocks.usage.count_own(victim)
        if not num_freed:
            return inf
        if victim.has_last_in_flight and not victim.group.beams:
            return 0.0
        costs = self._costs
        price = costs.recompute_seconds if self._config.preemption_mode == "recompute" else costs.preempt_seconds
        return price(victim.num_scheduled) / num_freed

    def preempt(self, victim: Sequence, step: StepBuilder) -> None:
        """Takes the blocks and the row of a running sequence."""
        self._queues.take_victim(victim)
        step.has_preempted = True
        self.num_preemptions_total += 1
        if self._is_worth_a_swap(victim) and self._blocks.swap_out(victim, step):
            self._queues.swap_out(victim)
            self.num_swaps_total += 1
        else:
            self.start_over(victim)

    def _is_worth_a_swap(self, victim: Sequence) -> bool:
        if victim.has_last_in_flight or victim.forked_from:
            return False
        mode = self._config.preemption_mode
        return mode == "swap" or (mode == "auto" and self._costs.prefers_swap(victim.num_scheduled))

    def start_over(self, victim: Sequence) -> None:
        """Frees a victim's blocks. It will be prefilled again, with its known tokens and those in flight."""
        is_parked = victim.group.beams is not None and victim.has_last_in_flight
        self._blocks.free(victim)
        victim.forked_from = None
        victim.is_prefilling = True
        victim.num_scheduled = victim.num_computed = 0
        if is_parked:
            victim.status = SequenceStatus.PARKED
        else:
            self._queues.start_over(victim)

    def take_last(self) -> None:
        """Restarts the last running sequence, a beam that waits for others of its group which cannot run."""
        victim = self._queues.running[-1]
        self._queues.take_victim(victim)
        self.num_preemptions_total += 1
        self.start_over(victim)

    # Room for one

    def make_room(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Finds a slot for the sequence's next token, and preempts those behind it if need be.

        Returns False if the sequence itself was preempted.
        """
        queues = self._queues
        _introduce(sequence, step)
        while not self._blocks.grow(sequence, step):
            candidates = queues.find_behind(sequence, step.step_id)
            if candidates:
                self.preempt_one(candidates, step)
            elif len(queues.running) > 1 or not self._reclaim(queues.swapped, step):
                self.preempt(sequence, step)
                return False
        return True

    def may_preempt_lower(self, sequence: Sequence, step: StepBuilder, over_share: set[str]) -> bool:
        """Returns whether preempting all candidates would admit a waiting sequence; if not, none should be preempted.

        Candidates are all sequences that it outranks, and those of the tenants in `over_share`.
        """
        queues, blocks, group = self._queues, self._blocks, sequence.group
        candidates = self._find_below(sequence, step, over_share)
        num_rows = queues.num_rows - sum(other.group.num_rows for other in candidates)
        swapped = self._find_swapped_below(sequence, over_share)
        if not (candidates or swapped) or num_rows + group.num_rows > queues.max_rows:
            return False
        num_left = len(queues.running) - len(candidates)
        num_needed = blocks.count_missing(sequence) + blocks.count_beside(sequence, num_left)
        return blocks.usage.may_free([*reversed(candidates), *swapped], num_needed)

    def preempt_lower(self, sequence: Sequence, step: StepBuilder, over_share: set[str]) -> bool:
        """Preempts one sequence below a waiting one, or one that is swapped out and still holds blocks.

        Returns False if none is left. `over_share` is fixed before the first preemption: if it shrank meanwhile, this
        would stop halfway with nothing gained.
        """
        queues = self._queues
        candidates = queues.find_lowest(self._find_below(sequence, step, over_share))
        if not candidates:
            swapped = self._find_swapped_below(sequence, over_share) if queues.running else queues.swapped
            return self._reclaim(swapped, step)
        self.preempt_one(candidates, step)
        return True

    def _find_below(self, sequence: Sequence, step: StepBuilder, over_share: set[str]) -> list[Sequence]:
        """Finds the running sequences that may be preempted for a waiting one, in their order."""
        queues = self._queues
        below = queues.find_below(sequence, step.step_id)
        running = [other for other in queues.running if other.last_step_id != step.step_id]
        return self._with_over_share(sequence, below, running, over_share)

    def _find_swapped_below(self, sequence: Sequence, over_share: set[str]) -> list[Sequence]:
        """Finds the swapped sequences whose remaining blocks may be taken for a waiting one, in their order."""
        queues = self._queues
        return self._with_over_share(sequence, queues.find_swapped_below(sequence), queues.swapped, over_share)

    def _with_over_share(
        self, sequence: Sequence, below: list[Sequence], queue: list[Sequence], over_share: set[str]
    ) -> list[Sequence]:
        """Adds to `below` the sequences of a queue whose tenants hold more than their share."""
        if not over_share:
            return below
        chosen = set(below)
        return [
            other
            for other in queue
            if other in chosen or (other.group.spec.tenant in over_share and self._queues.gives_way_to(other, sequence))
        ]

    def find_over_share(self, sequence: Sequence) -> set[str]:
        """Finds the tenants over their share of rows or blocks, if a waiting sequence may take from them.

        It may if few tenants have all the rows, its own tenant has none, and it needs no more than a share. It may only
        do so when it begins: if a preempted sequence could, two would preempt each other for ever.
        """
        queues, blocks = self._queues, self._blocks
        is_new = not (sequence.is_known or sequence.group.num_outputs)
        if not (is_new and queues.has_none(sequence) and queues.tenant_shares.has_few_tenants):
            return set()
        share = blocks.device.num_usable // (queues.tenant_shares.num_tenants + 1)
        if blocks.count_missing(sequence) > share or sequence.group.num_rows > queues.tenant_shares.share:
            return set()
        over_share = {tenant for tenant, num_held in self._count_held().items() if num_held > share}
        return over_share.union(queues.tenant_shares.find_over_share())

    def _count_held(self) -> Counter[str]:
        """Counts the device blocks that each tenant's sequences hold; a shared block counts for each holder."""
        held = Counter[str]()
        for queue in (self._queues.running, self._queues.swapped):
            for sequence in queue:
                num_held = sum(block != 0 for block in sequence.block_ids) + len(sequence.fixed_ids)
                held[sequence.group.spec.tenant] += num_held
        return held

    def reclaim_behind(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Takes blocks from the other swapped sequences for this one, while nothing runs."""
        others = [other for other in self._queues.swapped if other is not sequence]
        return self._reclaim(others, step)

    def _reclaim(self, swapped: list[Sequence], step: StepBuilder) -> bool:
        """Restarts the last of these sequences that still holds device blocks. Returns False if there is none."""
        for victim in reversed(swapped):
            if self._blocks.usage.has_any(victim):
                self._queues.swapped.remove(victim)
                self.start_over(victim)
                step.has_preempted = True
                return True
        return False


def _introduce(sequence: Sequence, step: StepBuilder) -> None:
    """Sends the worker a beam that branched off: as a fork of its parent's row, if that is still there."""
    parent = sequence.forked_from
    if parent is None:
        return
    if parent.status is SequenceStatus.RUNNING and not parent.is_prefilling:
        step.add_fork(parent, sequence)
    else:
        step.add_new(sequence)
    sequence.forked_from = None
