"""The core's interface: requests in, steps out, answers in. Owns the sequences; knows nothing of messages and workers.

The next step is made before the last one is answered. The ids of tokens in flight are not known yet, but their number
is. What a step computes counts only once its answer has come.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from blockyard.contract.sampling import FinishReason
from scheduler_service.core import integrity, recovery
from scheduler_service.core.blocks.block_manager import BlockManager
from scheduler_service.core.config import CoreConfig, NeverFits, Room, StepMismatch
from scheduler_service.core.cost import CostModel
from scheduler_service.core.live_groups import LiveGroups, Totals
from scheduler_service.core.planning.answers import Answers
from scheduler_service.core.planning.planner import Planner
from scheduler_service.core.queues.queues import Queues
from scheduler_service.core.recovery import Evacuated, Suspects
from scheduler_service.core.values import CacheReset, OwnerUpdate, SchedulerOutput, SchedulerStats, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.planning.lora_slots import LoraSlots
    from scheduler_service.core.sequence import Group
    from scheduler_service.core.step import StepBuilder, StepInFlight

__all__ = ["CoreConfig", "NeverFits", "Scheduler", "StepMismatch"]


class Scheduler:
    """Continuous batching over a paged cache: one object for each replica. Not for several threads."""

    def __init__(self, config: CoreConfig, suspects: Suspects | None = None) -> None:
        self.config = config
        self._costs = CostModel(config.block_size, len(config.kv_windows), config.num_state_blocks)
        self._blocks = BlockManager(config, self._costs)
        self._queues = Queues(config.max_rows, config.aging_seconds if config.policy == "priority" else None)
        self._planner = Planner(config, self._queues, self._blocks, self._costs)
        self._planner.suspects = suspects or Suspects()
        self._totals = Totals()
        self._live = LiveGroups(self._queues, self._blocks, self._totals)
        self._answers = Answers(self._live, self._blocks, self._totals)
        self._groups = self._live.groups
        self._in_flight: deque[StepInFlight] = deque()
        self._next_step_id = 1
        self._has_changed = False  # since the last schedule() that returned None

    # Requests

    def adopt(self, groups: Iterable[Group]) -> dict[str, OwnerUpdate]:
        """Queues requests behind those already waiting; some may come from another scheduler.

        Returns updates for their owners: sequences that are as long as they may become here finish, and requests that
        never fit fail.
        """
        updates: dict[str, OwnerUpdate] = {}
        for group in groups:
            self._live.add(group)
            self._fit(group, updates)
        self._note_change()
        return updates

    def evacuate(self) -> list[Evacuated]:
        """Gives up all requests after the worker was lost, to be adopted here or elsewhere.

        Returns them in order of precedence. Steps without an answer did not happen, no block is held, and steps count
        from 1 again.
        """
        evacuated = recovery.give_up(self._queues, self._groups.values())
        self._live.clear()
        self._blocks.reset()
        self._planner.loras.clear()
        self._in_flight.clear()
        self._next_step_id = 1
        self._note_change()
        return evacuated

    def succeed(self, predecessor: Scheduler) -> None:
        """Takes over the totals of a scheduler with other pools."""
        self._totals.add(predecessor._totals)
        self._totals.num_given_back_blocks += predecessor._blocks.windows.num_given_back_total
        self._planner.preemption.count_on(predecessor._planner.preemption)
        self._planner.num_pieces_total = predecessor._planner.num_pieces_total
        self._planner.loras.passed_seconds = predecessor._planner.loras.passed_seconds

    def abort(
        self,
        request_id: str,
        sequence_index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        num_tokens: int | None = None,
    ) -> bool:
        """Ends a request, or one of its sequences, in any state. Returns False if there is nothing to end.

        The sequences of a beam search can only end together. No update is made, since the caller knows. `reason`: STOP
        for a stop string. Only the first `num_tokens` of the generated tokens count; None: all.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        if sequence_index is not None and group.beams:
            return False
        live = [s for s in group.live if sequence_index is None or s.sequence_index == sequence_index]
        self._live.end(group, live, reason, num_tokens)
        self._note_change()
        return bool(live)

    def has_unfinished(self) -> bool:
        return bool(self._groups)

    def take_ended(self) -> list[Group]:
        return self._live.take_ended()

    # Steps

    def can_schedule(self) -> bool:
        """Whether `schedule` may return a step. After it returned None, only once something has changed."""
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return False
        return bool(self._live.ended_ids) or (self._has_changed and bool(self._groups))

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        """Makes the next step; None if nothing is to be sent now.

        `now`: seconds of any steady clock, for the patience of adapters and the age of measurements.

        Raises RuntimeError if requests are live, no answer is due and no sequence can run: a bug of the core.
        """
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return None
        self._costs.pass_time(now)
        step = self._fill_step(now)
        if step.is_idle and self._groups and not self._in_flight and not self._live.ended_ids:
            raise RuntimeError(f"no live request can be scheduled after step {self._next_step_id - 1}")
        self._has_changed = not step.is_idle or not self._in_flight
        output = None if step.is_idle and not self._live.ended_ids else self._send(step)
        self._check_if_asked()
        return output

    def _fill_step(self, now: float) -> StepBuilder:
        oldest = self._in_flight[0].step_id if self._in_flight else self._next_step_id
        return self._planner.fill(self._next_step_id, oldest, now)

    def _send(self, step: StepBuilder) -> SchedulerOutput:
        output, in_flight = step.build(self._live.take_ended_ids())
        self._next_step_id += 1
        self._in_flight.append(in_flight)
        self._totals.num_swapped_out_blocks += len(step.swap_out)
        self._totals.num_swapped_in_blocks += len(step.swap_in)
        self._totals.num_copied_blocks += len(step.copies)
        return output

    # Answers

    def update(self, result: StepResult) -> dict[str, OwnerUpdate]:
        """Applies the answer to the oldest step in flight. Returns the update of each owner.

        Raises StepMismatch, without any change, if this cannot be the answer to that step.
        """
        if not self._in_flight:
            raise StepMismatch(f"the answer is to step {result.step_id}, and no step is in flight")
        step = self._in_flight[0]
        sampled = step.match(result)
        self._in_flight.popleft()
        if not result.failures:
            # A failed row may not have been computed, so the step's time says nothing about its work.
            seconds = result.forward_seconds
            self._costs.note_step(step.work, seconds, result.cache_seconds, result.num_draft_tokens)
            if self.config.prices_drafts and seconds > 0:
                self._note_pace(step, result)
        if step.drafts:
            self._totals.drafts += result.draft_counts
            self._planner.pace.note_drafts(result.num_draft_tokens)
        updates = self._answers.take(step, sampled, result)
        self._note_change()
        return updates

    def _note_pace(self, step: StepInFlight, result: StepResult) -> None:
        if result.sequence_ids and not (step.pieces or step.completed):
            num_sequences = len(result.sequence_ids)
            num_rows = num_sequences + result.num_draft_tokens
            self._planner.pace.note(num_rows, num_sequences, len(result.token_ids), result.forward_seconds)

    def _fit(self, group: Group, updates: dict[str, OwnerUpdate]) -> None:
        """Limits a group to the pools of this scheduler."""
        try:
            group.max_length = self.config.find_max_length(group.prompt_length, group.spec.max_tokens)
        except NeverFits as error:
            self._live.fail(group, str(error), updates)
            return
        for sequence in group.sequences:
            sequence.max_length = group.max_length
        if group.spec.pooling is not None:
            return  # it ends with its numbers, not with its length
        too_long = [sequence for sequence in group.live if len(sequence.token_ids) >= group.max_length]
        if too_long and group.beams:
            group.beams.search.give_up(sequence.output_token_ids for sequence in too_long)
            self._live.end_search(group, group.beams, updates)
            return
        for sequence in too_long:
            self._live.finish(sequence, FinishReason.LENGTH, updates.setdefault(sequence.owner, OwnerUpdate()))

    def count_outputs(self, sequence_ids: Iterable[int]) -> dict[str, int]:
        """Returns the live requests of these sequences, and how many tokens each has generated."""
        wanted = set(sequence_ids)
        return {
            request_id: group.num_outputs
            for request_id, group in self._groups.items()
            if any(sequence.sequence_id in wanted for sequence in group.computed)
        }

    # Room for more

    def find_room(self) -> Room:
        """Computes what could be admitted beside the sequences that wait here already."""
        blocks, queues = self._blocks, self._queues
        num_blocks = blocks.device.num_free - blocks.num_watermark - queues.num_running * blocks.num_groups
        num_tokens, num_rows = self.config.max_num_batched_tokens, queues.max_rows - queues.num_rows
        loras = self._planner.loras.find_room() if self.config.max_loras else None
        room = Room(num_tokens, num_rows, num_blocks, blocks.groups, loras)
        for queue in (self._queues.swapped, self._queues.waiting):
            for sequence in queue:
                group = sequence.group
                room.take(len(sequence.token_ids), group.num_rows, lora_id=group.spec.lora_id)
        room.urgent_tenants = {sequence.group.spec.tenant for sequence in self._queues.find_all_urgent()}
        room.outranks = lambda group: any(map(self._queues.is_urgent, group.live))
        return room

    def count_cached_tokens(self, group: Group) -> int:
        """Counts the tokens of a request's prompt that the prefix cache here holds."""
        return self._blocks.count_cached_tokens(group.leader)

    def seed_pace(self, num_rows: tuple[int, ...], seconds: tuple[float, ...]) -> None:
        """Begins the prices of drafts with the times of decodes that a worker measured at its warm-up."""
        self._planner.pace.seed(num_rows, seconds)

    @property
    def lora_slots(self) -> LoraSlots:
        """The worker's slots for adapters; for reading only."""
        return self._planner.loras

    @property
    def used_lora_ids(self) -> set[int]:
        return {group.spec.lora_id for group in self._groups.values()} - {0}

    # Operators' calls

    def reset_prefix_cache(self) -> CacheReset:
        """Forgets the content of all blocks that no sequence holds."""
        reset = self._blocks.reset_prefix_cache()
        self._note_change()
        return reset

    def stats(self) -> SchedulerStats:
        """Returns present counts, and totals since the start of the process."""
        totals, device, host = self._totals, self._blocks.device, self._blocks.host
        return SchedulerStats(
            num_waiting=len(self._queues.waiting),
            num_running=self._queues.num_running,
            num_swapped=len(self._queues.swapped),
            num_device_blocks=device.num_usable,
            num_free_device_blocks=device.num_free,
            num_cached_device_blocks=device.num_cached,
            num_host_blocks=host.num_usable,
            num_free_host_blocks=host.num_free,
            num_steps_in_flight=len(self._in_flight),
            num_preemptions_total=self._planner.preemption.num_preemptions_total,
            num_swapped_out_blocks_total=totals.num_swapped_out_blocks,
            num_swapped_in_blocks_total=totals.num_swapped_in_blocks,
            num_copied_blocks_total=totals.num_copied_blocks,
            num_prefill_pieces_total=self._planner.num_pieces_total,
            num_cached_tokens_total=totals.num_cached_tokens,
            num_prompt_tokens_total=totals.num_prompt_tokens,
            num_completion_tokens_total=totals.num_completion_tokens,
            num_waiting_tokens=sum(len(sequence.token_ids) for sequence in self._queues.waiting),
            num_cached_host_blocks=host.num_cached,
            num_swaps_total=self._planner.preemption.num_swaps_total,
            num_queried_tokens_total=totals.num_queried_tokens,
            num_given_back_blocks_total=totals.num_given_back_blocks + self._blocks.windows.num_given_back_total,
            drafts_total=totals.drafts,
        )

    def check_integrity(self) -> None:
        """Checks all state. Raises AssertionError that says what is wrong."""
        integrity.check(self._groups, self._queues, self._blocks, list(self._in_flight), self.config)
        self._planner.loras.check([*self._queues.running, *self._queues.swapped])

    def _note_change(self) -> None:
        self._has_changed = True
        self._check_if_asked()

    def _check_if_asked(self) -> None:
        if self.config.debug_integrity:
            self.check_integrity()
