"""Fills one step: who computes how much of it, and who gives way. Knows nothing of answers, owners and step numbers.

The unified token budget of vLLM V1 (running sequences first, a prefill in pieces beside the decodes) with the explicit
block lists of V0 (swap out, swap in, copy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_service.core.recovery import Suspects
from scheduler_service.core.sequence import SequenceStatus
from scheduler_service.core.step import StepBuilder

if TYPE_CHECKING:
    from scheduler_service.core.block_manager import BlockManager
    from scheduler_service.core.policy import Queues
    from scheduler_service.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step may hold. `max_prefill_chunk`: tokens of one sequence's prefill, 0 for no limit but `max_tokens`."""

    max_tokens: int
    max_prefill_chunk: int
    swaps: bool


class Planner:
    """Moves sequences between the queues and gives them blocks, a step at a time.

    Decodes first, each one token: all that run have one in every step, for there are no more rows than tokens. Then
    the running prefills, whose blocks were reserved on admission; so only decodes preempt, and as they are served in
    order of precedence and victims are taken from the end, nobody is preempted who is already in the step.
    """

    __slots__ = (
        "_blocks",
        "_limits",
        "_oldest_in_flight",
        "_queues",
        "num_pieces_total",
        "num_preemptions_total",
        "suspects",
    )

    def __init__(self, limits: StepLimits, queues: Queues, blocks: BlockManager) -> None:
        self._limits = limits
        self._queues = queues
        self._blocks = blocks
        self._oldest_in_flight = 0
        self.num_preemptions_total = 0
        self.num_pieces_total = 0
        self.suspects = Suspects()

    def fill(self, step_id: int, oldest_in_flight: int) -> StepBuilder:
        """The step with this id. `oldest_in_flight`: the first id that is not answered; this one's if all are."""
        self._oldest_in_flight = oldest_in_flight
        step = StepBuilder(step_id, self._limits.max_tokens)
        self._queues.begin_step()
        self._schedule_decodes(step)
        self._schedule_prefills(step)
        if not step.has_preempted:
            self._schedule_swapped(step)
        if not step.has_preempted and not self._queues.swapped:
            self._schedule_waiting(step)
        self._blocks.settle()
        return step

    def preempt_all_but_first(self) -> None:
        """Free whatever blocks can be freed: the way out of a state that must not exist. Nothing may be in flight."""
        queues = self._queues
        queues.begin_step()
        while queues.swapped:
            self._start_over(queues.swapped.pop())
        while len(queues.running) > 1:
            self._start_over(queues.take_victim())

    def _schedule_decodes(self, step: StepBuilder) -> None:
        """One token for each running sequence that is not prefilling and not at its end. The hot loop."""
        rows: list[Sequence] = []
        add_row = rows.append
        step_id = step.step_id
        for sequence in self._queues.running:
            if sequence.is_prefilling:
                continue
            position = sequence.num_scheduled
            if position + 1 >= sequence.max_length:
                continue  # its last token is in flight
            if position == sequence.grow_at and not self._make_room(sequence, step):
                break  # it was the last one, and is its own victim
            sequence.num_scheduled = position + 1
            sequence.last_step_id = step_id
            add_row(sequence)
        step.add_decodes(rows)

    def _make_room(self, sequence: Sequence, step: StepBuilder) -> bool:
        """A slot for its next token, at the expense of those behind it. False: it was preempted itself."""
        running = self._queues.running
        while not self._blocks.grow(sequence, step):
            if len(running) == 1 and self._reclaim(step):
                continue
            self._preempt(step)
            if sequence.status is not SequenceStatus.RUNNING:
                return False
        return True

    def _preempt(self, step: StepBuilder) -> None:
        """Take the blocks of the last running sequence. Never one of this step: those behind are not yet in it."""
        victim = self._queues.take_victim()
        step.has_preempted = True
        self.num_preemptions_total += 1
        has_more_to_do = victim.is_prefilling or victim.num_scheduled + 1 < victim.max_length
        if self._limits.swaps and has_more_to_do and self._blocks.swap_out(victim, step):
            self._queues.swap_out(victim)
        else:
            self._start_over(victim)

    def _start_over(self, victim: Sequence) -> None:
        """It will be prefilled with all that is known of it, and with what is still in flight."""
        self._blocks.free(victim)
        victim.is_prefilling = True
        victim.num_scheduled = victim.num_computed = 0
        self._queues.start_over(victim)

    def _reclaim(self, step: StepBuilder) -> bool:
        """Let a swapped sequence that still holds device blocks start over, the last first. False: there is none."""
        for victim in reversed(self._queues.swapped):
            if self._blocks.holds_device_blocks(victim):
                self._queues.swapped.remove(victim)
                self._start_over(victim)
                step.has_preempted = True
                return True
        return False

    def _schedule_prefills(self, step: StepBuilder) -> None:
        """The next pieces. Their blocks were reserved on admission."""
        for sequence in self._queues.prefilling.copy():
            if not step.num_tokens_left:
                return
            self._schedule_piece(sequence, step)

    def _schedule_piece(self, sequence: Sequence, step: StepBuilder, num_kept: int = 0) -> None:
        """As much as limits allow of what is left but the last `num_kept` tokens, which may be nothing."""
        num_left = len(sequence.token_ids) - sequence.num_scheduled
        num_piece = min(num_left - num_kept, step.num_tokens_left, self._limits.max_prefill_chunk or num_left)
        if not num_piece:
            return
        sequence.num_scheduled += num_piece
        is_last = num_piece == num_left
        step.add_row(sequence, num_piece, is_sampled=is_last)
        self.num_pieces_total += 1
        if is_last:
            self._end_prefill(sequence, step)

    def _end_prefill(self, sequence: Sequence, step: StepBuilder) -> None:
        group = sequence.group
        sequence.is_prefilling = False
        self._queues.prefilling.remove(sequence)
        if not group.num_outputs:
            step.completed.append(group)
        if group.unforked:
            self._fork(sequence, group.unforked, step)
            group.unforked = []

    def _fork(self, parent: Sequence, children: list[Sequence], step: StepBuilder) -> None:
        """The children sample from the parent's logits. Their rows were kept free."""
        for child in children:
            child.is_prefilling = False
            self._blocks.fork(parent, child)
            step.add_fork(parent, child)
            step.add_row(child, 0, is_sampled=True)
        self._queues.fork(parent, children)

    def _schedule_swapped(self, step: StepBuilder) -> None:
        """First out, first in. One that is in flight waits: its blocks become findable only with its answers."""
        queues = self._queues
        while queues.swapped and step.num_tokens_left:
            sequence = queues.swapped[0]
            if self._is_in_flight(sequence) or not queues.has_rows(sequence):
                return
            if self._blocks.swap_in(sequence, step, self._count_spare() if queues.running else 0):
                del queues.swapped[0]
                queues.start(sequence)
                self._continue(sequence, step)
            elif queues.running or not self._reclaim_behind(sequence, step):
                return

    def _reclaim_behind(self, sequence: Sequence, step: StepBuilder) -> bool:
        """With nobody running, make room for the first swapped one at the expense of the others."""
        others = [s for s in self._queues.swapped if s is not sequence and self._blocks.holds_device_blocks(s)]
        return bool(others) and self._reclaim(step)

    def _continue(self, sequence: Sequence, step: StepBuilder) -> None:
        if sequence.is_prefilling:
            self._schedule_piece(sequence, step)
        else:
            sequence.num_scheduled += 1
            step.add_row(sequence, 1, is_sampled=True)

    def _schedule_waiting(self, step: StepBuilder) -> None:
        """First come, first served; small ones pass one that cannot be admitted, unless it was preempted."""
        queues = self._queues
        num_refused = 0
        while step.num_tokens_left and queues.num_rows < queues.max_rows:
            sequence = queues.waiting.peek(num_refused)
            if sequence is None or self._is_in_flight(sequence):
                return
            if queues.has_rows(sequence) and self.suspects.may_start(sequence) and self._admit(sequence, step):
                queues.waiting.take(sequence, num_refused)
                queues.start(sequence)
                self._begin(sequence, step)
            elif sequence.is_known:
                return
            else:
                num_refused += 1

    def _admit(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Blocks for all that is known of it, if there is room for the next token of each of its group too."""
        if not self._queues.running:
            return self._blocks.admit(sequence, step, 0)
        num_spare = self._count_spare() if sequence.is_known else self._blocks.num_watermark
        return self._blocks.admit(sequence, step, num_spare + sequence.group.num_rows)

    def _count_spare(self) -> int:
        """Blocks that stay free when one comes back: one for each that runs, or it would be the next victim at once."""
        return max(self._blocks.num_watermark, len(self._queues.running))

    def _begin(self, sequence: Sequence, step: StepBuilder) -> None:
        """Tell the worker of it and compute its first piece.

        Forks come before new sequences in a step, so a leader computes its last token in a later one.
        """
        group = sequence.group
        if not sequence.is_known:
            group.num_cached_tokens = sequence.num_scheduled
        step.add_new(sequence)
        self._schedule_piece(sequence, step, num_kept=1 if group.unforked else 0)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step_id >= self._oldest_in_flight
