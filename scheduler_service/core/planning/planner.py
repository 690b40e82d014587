"""Plans one step: how much of each sequence it computes. Knows nothing of answers, owners and step numbers.

The unified token budget of vLLM V1 (running sequences first, a prefill in pieces beside the decodes) with the explicit
block lists of V0 (swap out, swap in, copy).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, compress
from operator import attrgetter
from typing import TYPE_CHECKING

from scheduler_service.core.pace import Pace
from scheduler_service.core.planning.lora_slots import LoraSlots
from scheduler_service.core.planning.preemption import Preemption
from scheduler_service.core.queues.waiting_queue import MAX_REFUSED
from scheduler_service.core.recovery import Suspects
from scheduler_service.core.sequence import Sequence, SequenceStatus
from scheduler_service.core.step import StepBuilder

if TYPE_CHECKING:
    from scheduler_service.core.blocks.block_manager import BlockManager
    from scheduler_service.core.config import CoreConfig
    from scheduler_service.core.cost import CostModel
    from scheduler_service.core.queues.queues import Queues

MIN_PREFILL_TOKENS = 32
"""Least prefill tokens of a step with decodes, however tight the target of its time: prefills must not starve."""


class Planner:
    """Moves sequences between the queues and gives them blocks, a step at a time.

    First it makes room for waiting sequences that outrank others. Then it schedules decodes, one token each: every
    running sequence gets one in every step, since there are no more rows than tokens. Then running prefills, whose
    blocks were reserved on admission. So only decodes preempt, and since they are served in order of precedence and
    yield to those before them, no sequence of the step is ever preempted.

    With several virtual engines a step has its share of the decodes: among those whose last token is known, the ones
    that have waited longest. Each token is sent to the worker with the step that computes it. The pieces of a prompt
    need no token and are sent one after the other.
    """

    __slots__ = (
        "_blocks",
        "_config",
        "_oldest_in_flight",
        "_queues",
        "_step_time",
        "loras",
        "num_pieces_total",
        "pace",
        "preemption",
        "suspects",
    )

    def __init__(self, config: CoreConfig, queues: Queues, blocks: BlockManager, costs: CostModel) -> None:
        self._config = config
        self._queues = queues
        self._blocks = blocks
        self._step_time = costs.step_time
        self._oldest_in_flight = 0
        self.pace = Pace(config.max_draft_rows)
        self.loras = LoraSlots(config.max_loras, config.lora_patience_seconds, queues)
        self.preemption = Preemption(config, queues, blocks, costs)
        self.num_pieces_total = 0
        self.suspects = Suspects()

    def fill(self, step_id: int, oldest_in_flight: int, now: float) -> StepBuilder:
        """Plans a step. `oldest_in_flight`: the first step without an answer; `step_id` itself if all are answered."""
        self._oldest_in_flight = oldest_in_flight
        step = StepBuilder(step_id, self._config.max_num_batched_tokens)
        self._queues.begin_step()
        if self._blocks.has_windows:
            self._blocks.windows.reserve(self._queues.prefilling, step)
        if self._config.max_loras:
            self.loras.begin_step(now)
        self._begin_urgent(step)
        if self._config.num_virtual_engines > 1:
            self._schedule_share(step, self._config.num_virtual_engines)
        else:
            self._schedule_decodes(step)
        self._limit_prefills(step)
        self._schedule_prefills(step)
        if not step.has_preempted:
            self._schedule_swapped(step)
        if not step.has_preempted and not self._queues.swapped:
            self._schedule_waiting(step)
        if step.is_idle and oldest_in_flight == step_id:
            self._make_way(step)
        if self._config.max_draft_tokens:
            self._allow_drafts(step)
        self._blocks.settle(step)
        return step

    def _begin_urgent(self, step: StepBuilder) -> None:
        """Starts urgent sequences at the expense of others: those that outrank them, or whose tenant has no row.

        The first piece of such a sequence comes after the decodes and before all other prefills. One that cannot begin
        does not hold the others back.
        """
        queues = self._queues
        refused: set[Sequence] = set()
        while len(refused) <= MAX_REFUSED and (sequence := queues.find_urgent(refused)) is not None:
            # No sequence is preempted to free a slot.
            may_begin = self._has_slot(sequence) and not self._is_held_back(sequence)
            if self._is_in_flight(sequence) or not (may_begin and self._admit_before_others(sequence, step)):
                refused.add(sequence)
                continue
            queues.waiting.remove(sequence)
            sequence.hurries = len(sequence.token_ids) <= self._config.max_num_batched_tokens
            self._begin(sequence, step)

    def _admit_before_others(self, sequence: Sequence, step: StepBuilder) -> bool:
        if self._fits(sequence, step):
            return True
        over_share = self.preemption.find_over_share(sequence)
        if not (step.takes(sequence) and self.preemption.may_preempt_lower(sequence, step, over_share)):
            return False
        while self.preemption.preempt_lower(sequence, step, over_share):
            if self._fits(sequence, step):
                return True
        return False

    def _fits(self, sequence: Sequence, step: StepBuilder) -> bool:
        has_tokens = not self._config.whole_prompts or len(sequence.token_ids) <= step.num_prefill_left
        return has_tokens and step.takes(sequence) and self._queues.has_rows(sequence) and self._admit(sequence, step)

    def _limit_prefills(self, step: StepBuilder) -> None:
        """Limits prefills beside decodes to what the target of the step's time allows."""
        target_seconds, num_decodes = self._config.target_step_seconds, len(step.rows)
        if target_seconds and num_decodes and self._step_time.is_measured:
            num_tokens = self._step_time.count_prefill_tokens(num_decodes, target_seconds)
            step.max_prefill_tokens = max(num_tokens, MIN_PREFILL_TOKENS)

    def _schedule_decodes(self, step: StepBuilder) -> None:
        """Gives one token to each running sequence that is not prefilling and not at its end. The hot loop."""
        rows: list[Sequence] = []
        add_row = rows.append
        step_id = step.step_id
        for sequence in self._queues.running:
            if sequence.is_prefilling:
                continue
            position = sequence.num_scheduled
            if position + 1 >= sequence.max_length:
                continue  # its last token is in flight
            if position == sequence.grow_at and not self.preemption.make_room(sequence, step):
                break  # no sequence behind it had a block to give, so it was preempted itself
            sequence.num_scheduled = position + 1
            sequence.last_step_id = step_id
            add_row(sequence)
        step.add_decodes(rows)
        if self._queues.num_beams:
            step.split_decodes()

    def _allow_drafts(self, step: StepBuilder) -> None:
        """Lets the worker draft for decodes, with what is left of tokens, rows and blocks: nobody gives way for it.

        A suspect drafts nothing.
        """
        config = self._config
        prices: tuple[int, ...] = ()
        num_rows = config.max_draft_rows
        if config.prices_drafts:
            if step.step_id % self.pace.period:
                return
            prices = self.pace.find_prices(len(step.rows))
            num_rows = len(prices)
        if num_rows > step.num_tokens_left:
            num_rows = step.num_tokens_left
        if num_rows <= 0 or not step.num_decodes:
            return
        drafts = _share_rows(num_rows, step.num_decodes, step.step_id % step.num_decodes, config.max_draft_tokens)
        suspects = self.suspects.num_outputs
        if suspects:
            pairs = zip(step.sampled, drafts, strict=False)
            drafts = tuple([0 if sequence.group in suspects else most for sequence, most in pairs])
        num_steps = config.max_steps_in_flight
        for sequence, most in compress(zip(step.sampled, drafts, strict=False), drafts):
            end = sequence.num_scheduled + most
            if end > sequence.grow_at or end + num_steps > sequence.max_length:
                fitting = self._limit_drafts(sequence, most, step)
                if fitting < most:
                    place = step.sampled.index(sequence)
                    drafts = (*drafts[:place], fitting, *drafts[place + 1 :])
                    end = sequence.num_scheduled + fitting
            sequence.num_scheduled = end
        if any(drafts):
            step.drafts, step.draft_prices = drafts, prices

    def _limit_drafts(self, sequence: Sequence, num_drafts: int, step: StepBuilder) -> int:
        """Returns for how many drafts a sequence has room before its end, with blocks that others can do without.

        Before its end it keeps the room of a token for each further step: if all these drafts are wrong, the steps that
        are sent before that is known have something to compute.
        """
        last = sequence.max_length - self._config.max_steps_in_flight
        num_drafts = max(min(num_drafts, last - sequence.num_scheduled), 0)
        if sequence.num_scheduled + num_drafts <= sequence.grow_at:
            return num_drafts
        num_spare = max(self._blocks.num_watermark, len(self._queues.running) * self._blocks.num_groups)
        return self._blocks.extend(sequence, num_drafts, num_spare, step)

    def _schedule_share(self, step: StepBuilder, num_shares: int) -> None:
        """Gives one token to each decode of one virtual engine, and sends the worker the token before it."""
        decodes = [sequence for sequence in self._queues.running if not sequence.is_prefilling]
        known = [s for s in decodes if s.num_scheduled < len(s.token_ids) and s.num_scheduled + 1 < s.max_length]
        num_rows = -(-len(decodes) // num_shares)
        chosen = set(sorted(known, key=attrgetter("last_step_id"))[:num_rows])
        rows: list[Sequence] = []
        for sequence in known:
            if sequence not in chosen or sequence.status is not SequenceStatus.RUNNING:
                continue
            if sequence.num_scheduled == sequence.grow_at and not self.preemption.make_room(sequence, step):
                break
            sequence.num_scheduled += 1
            sequence.last_step_id = step.step_id
            rows.append(sequence)
        step.add_decodes(rows)
        step.split_decodes()
        step.bring_tokens()
        # The first step must not admit all that wait: the other engines would have nothing.
        step.max_rows = -(-self._config.max_rows // num_shares)

    def _make_way(self, step: StepBuilder) -> None:
        """If nothing can run, takes blocks and rows from beams that wait for others of their groups.

        If nothing even waits in a row, the last sequence was preempted for blocks that were held until it began.
        """
        queues = self._queues
        while step.is_idle and (queues.swapped or queues.waiting):
            is_last = not queues.running
            if not is_last:
                self.preemption.take_last()
            if self._config.max_loras:
                self.loras.recount()
            self._schedule_swapped(step)
            if not queues.swapped:
                self._schedule_waiting(step)
            if is_last:
                break

    def _schedule_prefills(self, step: StepBuilder) -> None:
        """Schedules the next pieces of prefills. Their blocks were reserved on admission."""
        for sequence in self._queues.prefilling.copy():
            if step.num_prefill_left:
                self._schedule_piece(sequence, step)

    def _schedule_piece(self, sequence: Sequence, step: StepBuilder) -> None:
        """Schedules as much of a prefill as the limits allow, which may be nothing.

        A step forks before it adds new sequences, so a leader that begins in a step computes its last token in a later
        one.
        """
        num_left = len(sequence.token_ids) - sequence.num_scheduled
        is_new_leader = bool(sequence.group.unforked) and sequence.last_step_id == step.step_id
        num_free = min(num_left - is_new_leader, step.num_prefill_left)
        if self._blocks.has_windows:
            num_free = min(num_free, self._blocks.windows.count_writable(sequence) - sequence.num_scheduled)
        if self._blocks.snapshots.every:
            num_free = min(num_free, self._blocks.snapshots.count_until(sequence))
        num_piece = _cut(num_left, num_free, self._config)
        if not num_piece:
            return
        sequence.num_scheduled += num_piece
        is_last = num_piece == num_left
        step.add_piece(sequence, num_piece, is_last=is_last)
        self.num_pieces_total += 1
        if is_last:
            self._end_prefill(sequence, step)

    def _end_prefill(self, sequence: Sequence, step: StepBuilder) -> None:
        group = sequence.group
        sequence.is_prefilling = sequence.hurries = False
        self._queues.prefilling.remove(sequence)
        if not group.num_outputs:
            step.completed.append(group)
        if group.unforked:
            self._fork(sequence, group.unforked, step)
            group.unforked = []

    def _fork(self, parent: Sequence, children: list[Sequence], step: StepBuilder) -> None:
        """Forks children, which sample from the parent's logits. Their rows were kept free.

        A child without room for its fixed blocks is prefilled by itself.
        """
        forked: list[Sequence] = []
        for child in children:
            if not self._blocks.fixed.has_room:
                self._queues.begin_alone(child)
                child.last_step_id = step.step_id  # it begins once its parent's token is known
                continue
            forked.append(child)
            child.is_prefilling = False
            self._blocks.fork(parent, child)
            step.add_fork(parent, child)
            step.add_row(child, 0, is_sampled=True)
        self._queues.fork(parent, forked)

    def _schedule_swapped(self, step: StepBuilder) -> None:
        """Swaps sequences in, first out, first in. One in flight waits: its answers make its blocks findable."""
        queues = self._queues
        while queues.swapped and step.num_tokens_left:
            sequence = queues.swapped[0]
            if self._is_in_flight(sequence) or not queues.has_rows(sequence):
                return
            if self._blocks.swap_in(sequence, step, self._blocks.count_spare(sequence, len(queues.running))):
                del queues.swapped[0]
                queues.start(sequence)
                self._continue(sequence, step)
            elif queues.running or not self.preemption.reclaim_behind(sequence, step):
                return

    def _continue(self, sequence: Sequence, step: StepBuilder) -> None:
        if sequence.is_prefilling:
            self._schedule_piece(sequence, step)
        else:
            sequence.num_scheduled += 1
            step.add_row(sequence, 1, is_sampled=True)
            if sequence.group.beams or self._config.num_virtual_engines > 1:
                step.inputs.append(sequence)

    def _schedule_waiting(self, step: StepBuilder) -> None:
        """Admits sequences in order. They may pass those that lack an adapter slot, and some that cannot be admitted.

        None may pass a preempted sequence.
        """
        waiting, queues = self._queues.waiting, self._queues
        refused: list[Sequence] = []
        num_passed = 0
        while step.num_prefill_left and queues.num_rows < queues.max_rows:
            sequence = waiting.peek(len(refused) + num_passed, refused)
            if sequence is None or self._is_in_flight(sequence):
                return
            has_slot = self._has_slot(sequence)
            if has_slot and not self._is_held_back(sequence) and self._fits(sequence, step):
                waiting.take(sequence, refused)
                self._begin(sequence, step)
                self._schedule_piece(sequence, step)
            elif sequence.is_known:
                return
            elif has_slot:
                refused.append(sequence)
            else:
                num_passed += 1

    def _admit(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Gives a sequence blocks for its known tokens, if the next tokens of its whole group fit as well."""
        return self._blocks.admit(sequence, step, self._blocks.count_beside(sequence, len(self._queues.running)))

    def _begin(self, sequence: Sequence, step: StepBuilder) -> None:
        """Starts a sequence that has its blocks, and adds it to the step."""
        if not sequence.is_known and not sequence.group.num_outputs:
            sequence.group.num_cached_tokens = sequence.num_scheduled
        if sequence.group.spec.lora:
            self.loras.start(sequence, step)
        self._queues.start(sequence)
        may_draft = self._config.max_draft_tokens and sequence.group.beams is None
        step.add_new(sequence, sequence.max_length if may_draft else 0)

    def _is_held_back(self, sequence: Sequence) -> bool:
        """Whether a sequence is suspected to have killed a worker and waits for another suspect to be tried."""
        if not self.suspects.num_outputs:
            return False
        return not self.suspects.may_start(sequence, chain(self._queues.running, self._queues.swapped))

    def _has_slot(self, sequence: Sequence) -> bool:
        return sequence.group.spec.lora is None or self.loras.may_start(sequence)

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return sequence.last_step_id >= self._oldest_in_flight


def _cut(num_left: int, num_free: int, config: CoreConfig) -> int:
    """Returns the size of the next piece of a prefill. A prompt that must stay whole is computed at once or not at all.

    A whole prompt that does not fit now is the first in the next step.
    """
    if config.whole_prompts:
        return num_left if num_free == num_left else 0
    return min(num_free, config.max_prefill_chunk or num_free)


@lru_cache(maxsize=1024)
def _share_rows(num_rows: int, num_decodes: int, first: int, most: int) -> tuple[int, ...]:
    """Returns how many rows each decode gets, at most `most`: equal parts, and what is left from the `first` one on."""
    share, num_more = divmod(num_rows, num_decodes)
    if share >= most:
        return (most,) * num_decodes
    rows = [share + 1] * num_more + [share] * (num_decodes - num_more)
    return (*rows[num_decodes - first :], *rows[: num_decodes - first])
