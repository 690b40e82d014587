"""Chooses who gives way when blocks or rows run out, and swaps it out or restarts it. One routine for all reasons."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import TYPE_CHECKING

from scheduler_service.core.sequence import SequenceStatus

if TYPE_CHECKING:
    from scheduler_service.core.blocks.block_manager import BlockManager
    from scheduler_service.core.config import CoreConfig
    from scheduler_service.core.cost import CostModel
    from scheduler_service.core.queues.queues import Queues
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.step import StepBuilder


class Preemption:
    """Takes blocks and rows away. Never from a sequence that is in the step already: its work would have to be undone.

    Tokens in flight of a victim stay valid and are taken when they are answered.
    """

    __slots__ = ("_blocks", "_config", "_costs", "_queues", "num_preemptions_total", "num_swaps_total")

    def __init__(self, config: CoreConfig, queues: Queues, blocks: BlockManager, costs: CostModel) -> None:
        self._config = config
        self._queues = queues
        self._blocks = blocks
        self._costs = costs
        self.num_preemptions_total = 0
        self.num_swaps_total = 0  # of them

    def count_on(self, predecessor: Preemption) -> None:
        """Takes over the totals of another one."""
        self.num_preemptions_total = predecessor.num_preemptions_total
        self.num_swaps_total = predecessor.num_swaps_total

    def preempt_one(self, candidates: list[Sequence], step: StepBuilder) -> None:
        """Preempts one of some candidates, as the configuration chooses."""
        self.preempt(self._choose(candidates), step)

    def _choose(self, candidates: list[Sequence]) -> Sequence:
        if self._config.victims == "last":
            return candidates[-1]
        return min(reversed(candidates), key=self._loss)

    def _loss(self, victim: Sequence) -> float:
        """Seconds of work lost for each device block that it frees."""
        num_freed = self._blocks.holdings.count_own(victim)
        if not num_freed:
            return inf
        if _has_all(victim) and not victim.group.beams:
            return 0.0
        costs = self._costs
        price = costs.recompute_seconds if self._config.preemption_mode == "recompute" else costs.preempt_seconds
        return price(victim.num_scheduled) / num_freed

    def preempt(self, victim: Sequence, step: StepBuilder) -> None:
        """Take the blocks and the row of a running sequence."""
        self._queues.take_victim(victim)
        step.has_preempted = True
        self.num_preemptions_total += 1
        if self._is_worth_a_swap(victim) and self._blocks.swap_out(victim, step):
            self._queues.swap_out(victim)
            self.num_swaps_total += 1
        else:
            self.start_over(victim)

    def _is_worth_a_swap(self, victim: Sequence) -> bool:
        if _has_all(victim) or victim.forked_from:
            return False
        mode = self._config.preemption_mode
        return mode == "swap" or (mode == "auto" and self._costs.prefers_swap(victim.num_scheduled))

    def start_over(self, victim: Sequence) -> None:
        """Frees a victim's blocks: it will be prefilled with its known tokens, and with those in flight."""
        is_parked = victim.group.beams is not None and _has_all(victim)
        self._blocks.free(victim)
        victim.forked_from = None
        victim.is_prefilling = True
        victim.num_scheduled = victim.num_computed = 0
        if is_parked:
            victim.status = SequenceStatus.PARKED
        else:
            self._queues.start_over(victim)

    def take_last(self) -> None:
        """Take the blocks and the row of the last running sequence, which waits for others that cannot run."""
        victim = self._queues.running[-1]
        self._queues.take_victim(victim)
        self.num_preemptions_total += 1
        self.start_over(victim)

    # Room for one

    def make_room(self, sequence: Sequence, step: StepBuilder) -> bool:
        """A slot for its next token, at the expense of those behind it. False: it was preempted itself."""
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

    def may_make_way(self, sequence: Sequence, step: StepBuilder, rich: set[str]) -> bool:
        """Whether a waiting sequence could be admitted if all that it outranks gave way, and all of the tenants that
        are `rich`: if not, none should."""
        queues, blocks, group = self._queues, self._blocks, sequence.group
        candidates = self._find_below(sequence, step, rich)
        num_rows = queues.num_rows - sum(other.group.num_rows for other in candidates)
        swapped = self._find_swapped_below(sequence, rich)
        if not (candidates or swapped) or num_rows + group.num_rows > queues.max_rows:
            return False
        num_left = len(queues.running) - len(candidates)
        num_needed = blocks.count_missing(sequence) + blocks.count_beside(sequence, num_left)
        return blocks.holdings.may_free([*reversed(candidates), *swapped], num_needed)

    def make_way(self, sequence: Sequence, step: StepBuilder, rich: set[str]) -> bool:
        """Let one more of those that it outranks give way, or of those that only hold blocks. False: there is none.

        `rich`: as before the first gave way. Who is no longer rich by then would stop, and nobody had gained anything.
        """
        queues = self._queues
        candidates = queues.find_lowest(self._find_below(sequence, step, rich))
        if not candidates:
            swapped = self._find_swapped_below(sequence, rich) if queues.running else queues.swapped
            return self._reclaim(swapped, step)
        self.preempt_one(candidates, step)
        return True

    def _find_below(self, sequence: Sequence, step: StepBuilder, rich: set[str]) -> list[Sequence]:
        """Finds who may give way to a waiting sequence of those that run, in their order."""
        queues = self._queues
        below = queues.find_below(sequence, step.step_id)
        running = [other for other in queues.running if other.last_step_id != step.step_id]
        return self._with_rich(sequence, below, running, rich)

    def _find_swapped_below(self, sequence: Sequence, rich: set[str]) -> list[Sequence]:
        """Finds who is swapped out and would give up for it what it still holds, in their order."""
        queues = self._queues
        return self._with_rich(sequence, queues.find_swapped_below(sequence), queues.swapped, rich)

    def _with_rich(
        self, sequence: Sequence, below: list[Sequence], queue: list[Sequence], rich: set[str]
    ) -> list[Sequence]:
        """Adds to those that give way the ones of a queue whose tenants hold more than their share."""
        if not rich:
            return below
        chosen = set(below)
        return [
            other
            for other in queue
            if other in chosen or (other.group.spec.tenant in rich and self._queues.gives_way_to(other, sequence))
        ]

    def find_rich(self, sequence: Sequence) -> set[str]:
        """Tenants that hold more than their share of rows or blocks, where a waiting sequence may have of that.

        Few tenants have it all, its own has nothing, and it asks for no more than a share: once, when it begins. One
        that gave way itself waits, or two would do so in turn for ever.
        """
        queues, blocks = self._queues, self._blocks
        is_new = not (sequence.is_known or sequence.group.num_outputs)
        if not (is_new and queues.has_none(sequence) and queues.tenant_shares.has_few_tenants):
            return set()
        share = blocks.device.num_usable // (queues.tenant_shares.num_tenants + 1)
        if blocks.count_missing(sequence) > share or sequence.group.num_rows > queues.tenant_shares.share:
            return set()
        rich = {tenant for tenant, num_held in self._count_held().items() if num_held > share}
        return rich.union(queues.tenant_shares.find_over_share())

    def _count_held(self) -> Counter[str]:
        """By tenant the device blocks that its sequences hold; shared ones count for each."""
        held = Counter[str]()
        for queue in (self._queues.running, self._queues.swapped):
            for sequence in queue:
                held[sequence.group.spec.tenant] += sum(block != 0 for block in sequence.block_ids)
        return held

    def reclaim_behind(self, sequence: Sequence, step: StepBuilder) -> bool:
        """With nobody running, make room for the first swapped one at the expense of the others."""
        others = [other for other in self._queues.swapped if other is not sequence]
        return self._reclaim(others, step)

    def _reclaim(self, swapped: list[Sequence], step: StepBuilder) -> bool:
        """Let the last of these that still holds device blocks start over. False: there is none."""
        for victim in reversed(swapped):
            if self._blocks.holdings.has_any(victim):
                self._queues.swapped.remove(victim)
                self.start_over(victim)
                step.has_preempted = True
                return True
        return False


def _introduce(sequence: Sequence, step: StepBuilder) -> None:
    """Tell the worker of a beam that began beside another one: as a copy of its row, if that is still as it was."""
    parent = sequence.forked_from
    if parent is None:
        return
    if parent.status is SequenceStatus.RUNNING and not parent.is_prefilling:
        step.add_fork(parent, sequence)
    else:
        step.add_new(sequence)
    sequence.forked_from = None


def _has_all(sequence: Sequence) -> bool:
    """Whether its last token is in flight, so that nothing more will be computed from its blocks, or not yet."""
    return not sequence.is_prefilling and sequence.num_scheduled + 1 >= sequence.max_length
