"""The core's face: requests in, steps out, answers in. Owns the sequences; knows nothing of messages and workers.

The next step is made before the last one is answered: the ids of tokens in flight are not known yet, their number is.
What a step computes counts only once its answer is here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scheduler_service.core import branching, integrity, recovery
from scheduler_service.core.block_manager import BlockManager
from scheduler_service.core.cost import CostModel
from scheduler_service.core.limits import DuplicateRequest, NeverFits, Room, SchedulerConfig, StepMismatch
from scheduler_service.core.output import FinishedSequence, FinishReason, OwnerUpdate, SchedulerStats
from scheduler_service.core.planner import Planner
from scheduler_service.core.policy import Queues
from scheduler_service.core.recovery import Suspects
from scheduler_service.core.sequence import Beams, Group, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scheduler_service.core.output import GroupSpec, SchedulerOutput, StepResult
    from scheduler_service.core.recovery import Evacuated
    from scheduler_service.core.step import StepBuilder, StepInFlight

__all__ = ["DuplicateRequest", "NeverFits", "Scheduler", "SchedulerConfig", "StepMismatch"]


@dataclass(slots=True)
class Totals:
    """What is counted from the start of the process."""

    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_stalls: int = 0


class Scheduler:
    """Continuous batching over a paged cache: one object for each replica. Not for several threads."""

    def __init__(self, config: SchedulerConfig, suspects: Suspects | None = None) -> None:
        self.config = config
        self._costs = CostModel(config.block_size)
        self._blocks = BlockManager(config, self._costs)
        self._queues = Queues(config.max_rows, config.aging_seconds if config.policy == "priority" else None)
        self._planner = Planner(config, self._queues, self._blocks, self._costs)
        self._planner.suspects = suspects or Suspects()
        self._ended_groups: list[Group] = []
        self._groups: dict[str, Group] = {}
        self._in_flight: deque[StepInFlight] = deque()
        self._ended_ids: list[int] = []  # the worker knows them and must forget them
        self._next_sequence_id = 1
        self._next_step_id = 1
        self._has_changed = False  # since the last schedule() that found nothing
        self._num_stalls = 0
        self._totals = Totals()

    # Requests

    def add(self, spec: GroupSpec, now: float) -> int:
        """Queue a request. Returns the id of its first sequence; those of the others follow it.

        Raises DuplicateRequest, and what `SchedulerConfig.fit` raises.
        """
        if spec.request_id in self._groups:
            raise DuplicateRequest(spec.request_id)
        group = Group(spec, self._next_sequence_id, self.config.fit(spec), now)
        self._next_sequence_id += spec.num_sequence_ids
        self.adopt([group])
        return group.sequences[0].sequence_id

    def adopt(self, groups: Iterable[Group]) -> dict[str, OwnerUpdate]:
        """Let requests wait here, behind those that do: new ones, or such as another scheduler gave up.

        Returns what their owners must be told at once: sequences that are as long as they may become here finish, and
        requests that never fit fail.
        """
        updates: dict[str, OwnerUpdate] = {}
        for group in groups:
            self._groups[group.spec.request_id] = group
            for sequence in group.live:
                if sequence not in group.unforked and sequence.status is not SequenceStatus.PARKED:
                    self._queues.waiting.push(sequence)
            self._fit(group, updates)
        self._note_change()
        return updates

    def evacuate(self) -> list[Evacuated]:
        """The worker is lost: give everything up, in order of precedence, to be adopted here or elsewhere.

        Whatever is not answered did not happen, no block is held, and steps count from 1 again.
        """
        evacuated = recovery.give_up(self._queues, self._groups.values())
        self._groups.clear()
        self._blocks.reset()
        self._in_flight.clear()
        self._ended_ids = []
        self._next_step_id = 1
        self._num_stalls = 0
        self._note_change()
        return evacuated

    def succeed(self, predecessor: Scheduler) -> None:
        """Count on where a scheduler with other pools stopped."""
        self._next_sequence_id = predecessor._next_sequence_id
        self._totals = predecessor._totals
        self._planner.preemption.num_preemptions_total = predecessor._planner.preemption.num_preemptions_total
        self._planner.num_pieces_total = predecessor._planner.num_pieces_total

    def abort(
        self,
        request_id: str,
        sequence_index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        num_tokens: int | None = None,
    ) -> bool:
        """End a request, or one of its sequences, in any state. False if there is nothing to end.

        The sequences of a beam search end together: one of them alone is nothing to end.

        Nobody is told, for whoever aborts knows. `reason`: STOP for a stop string. Of the tokens generated the first
        `num_tokens` count; None: all.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        if sequence_index is not None and group.beams:
            return False
        live = [s for s in group.live if sequence_index is None or s.sequence_index == sequence_index]
        self._end(group, live, reason, num_tokens)
        self._note_change()
        return bool(live)

    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return bool(self._groups)

    def take_ended(self) -> list[Group]:
        """The requests that ended since the last call, whatever they ended by."""
        ended, self._ended_groups = self._ended_groups, []
        return ended

    def _end(
        self,
        group: Group,
        sequences: Iterable[Sequence],
        reason: FinishReason = FinishReason.ABORT,
        num_tokens: int | None = None,
    ) -> None:
        """End these live sequences of a group: in order, children that are not forked first."""
        for sequence in sorted(sequences, key=lambda sequence: sequence not in group.unforked):
            self._end_one(sequence)
            sequence.finish(reason, num_tokens)
        if group.beams:
            group.end_search(reason)
        if group.is_finished:
            del self._groups[group.spec.request_id]
            self._ended_groups.append(group)

    def _end_one(self, sequence: Sequence) -> None:
        group = sequence.group
        if sequence in group.unforked:
            self._queues.drop_child(sequence)
        elif group.unforked:
            self._queues.replace_leader(sequence)
        else:
            self._queues.remove(sequence)
        self._blocks.free(sequence)
        if sequence.is_known:
            self._ended_ids.append(sequence.sequence_id)

    # Steps

    def can_schedule(self) -> bool:
        """Whether `schedule` is worth a call. After one that found nothing: not before something changed."""
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return False
        return bool(self._ended_ids) or (self._has_changed and bool(self._groups))

    def schedule(self, now: float) -> SchedulerOutput | None:
        """The next step; None if nothing is to be sent now. `now` is for policies that age: this one does not."""
        if len(self._in_flight) >= self.config.max_steps_in_flight:
            return None
        step = self._fill_step()
        if self._is_stalled(step):
            self._planner.preemption.all_but_first()
            self._totals.num_stalls += 1
            step = self._fill_step()
        self._has_changed = not step.is_idle or not self._in_flight
        output = None if step.is_idle and not self._ended_ids else self._send(step)
        self._check_if_asked()
        return output

    def _fill_step(self) -> StepBuilder:
        oldest = self._in_flight[0].step_id if self._in_flight else self._next_step_id
        return self._planner.fill(self._next_step_id, oldest)

    def _is_stalled(self, step: StepBuilder) -> bool:
        """Work, no answer to come that could change anything, and nothing to do, for the second time: a bug."""
        is_stuck = step.is_idle and not self._in_flight and bool(self._groups)
        self._num_stalls = self._num_stalls + 1 if is_stuck else 0
        return self._num_stalls > 1

    def _send(self, step: StepBuilder) -> SchedulerOutput:
        output, in_flight = step.build(self._ended_ids)
        self._ended_ids = []
        self._next_step_id += 1
        self._in_flight.append(in_flight)
        self._totals.num_swapped_out_blocks += len(step.swap_out)
        self._totals.num_swapped_in_blocks += len(step.swap_in)
        self._totals.num_copied_blocks += len(step.copies)
        return output

    # Answers

    def update(self, result: StepResult) -> dict[str, OwnerUpdate]:
        """Take the answer to the oldest step in flight. Returns what each owner is to be told.

        Raises StepMismatch, having changed nothing, for any other step's answer or one that cannot be this step's.
        """
        if not self._in_flight:
            raise StepMismatch(f"step {result.step_id} is not in flight")
        step = self._in_flight[0]
        sampled = step.match(result)
        self._in_flight.popleft()
        self._costs.note_step(step.work, result.forward_seconds, result.cache_seconds)
        updates: dict[str, OwnerUpdate] = {}
        self._report_prefills(step, updates)
        for sequence, num_computed in step.pieces:
            self._commit_piece(sequence, num_computed)
        self._take_tokens(sampled, result.token_ids, updates)
        if step.beams:
            self._take_candidates(step.beams, result.beam_candidates or {}, updates)
        if result.logprobs:
            self._take_logprobs(sampled, result.logprobs, updates)
        for sequence_id, told in result.prompt_logprobs:
            self._take_prompt_logprobs(step, sequence_id, told, updates)
        self._fail_sequences(step, result, updates)
        self._note_change()
        return updates

    def _report_prefills(self, step: StepInFlight, updates: dict[str, OwnerUpdate]) -> None:
        for group in step.completed:
            if group.is_finished:
                continue
            update = updates.setdefault(group.spec.owner, OwnerUpdate())
            update.prefilled.append((group.sequences[0].sequence_id, group.num_cached_tokens))
            self._totals.num_prompt_tokens += group.prompt_length
            self._totals.num_cached_tokens += group.num_cached_tokens

    def _commit_piece(self, sequence: Sequence, num_computed: int) -> None:
        """KV of a prefill; worth nothing if the sequence started over since."""
        if sequence.status is SequenceStatus.RUNNING or sequence.status is SequenceStatus.SWAPPED:
            sequence.num_computed = num_computed
        if sequence.status is SequenceStatus.RUNNING:
            self._blocks.publish(sequence)

    def _take_tokens(
        self, sequences: list[Sequence], token_ids: tuple[int, ...], updates: dict[str, OwnerUpdate]
    ) -> None:
        """One token for each. The hot loop.

        A step samples a sequence if it computes the last token known, so what is known before has KV afterwards.
        """
        running, waiting, finished = SequenceStatus.RUNNING, SequenceStatus.WAITING, SequenceStatus.FINISHED
        num_taken = 0
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            status = sequence.status
            if status is finished:
                continue
            known = sequence.token_ids
            length = len(known)
            known.append(token_id)
            if status is not waiting:
                sequence.num_computed = length
                if length >= sequence.publish_at and status is running:
                    self._blocks.publish(sequence)
            update = updates.get(sequence.owner)
            if update is None:
                update = updates[sequence.owner] = OwnerUpdate()
            update.sequence_ids.append(sequence.sequence_id)
            update.token_ids.append(token_id)
            num_taken += 1
            if token_id in sequence.stop_token_ids and length >= sequence.stop_from:
                self._finish(sequence, FinishReason.STOP, update)
            elif length + 1 >= sequence.max_length:
                self._finish(sequence, FinishReason.LENGTH, update)
        self._totals.num_completion_tokens += num_taken

    def _take_logprobs(
        self, sampled: list[Sequence], logprobs: Mapping[int, Any], updates: dict[str, OwnerUpdate]
    ) -> None:
        for sequence in sampled:
            told = logprobs.get(sequence.sequence_id)
            # One that had ended before got no token.
            if told is not None and len(sequence.logprobs) < len(sequence.token_ids) - sequence.group.prompt_length:
                sequence.logprobs.append(told)
                updates[sequence.owner].logprobs.append((sequence.sequence_id, told))

    def _take_candidates(
        self,
        proposers: list[Sequence],
        candidates: Mapping[int, tuple[tuple[int, float], ...]],
        updates: dict[str, OwnerUpdate],
    ) -> None:
        for beam in proposers:
            likeliest = candidates.get(beam.sequence_id)
            beams = beam.group.beams
            if likeliest is None or not beams or beam.status is SequenceStatus.FINISHED:
                continue
            self._commit_piece(beam, len(beam.token_ids))
            beams.candidates[beam] = likeliest
            if beams.has_all_candidates:
                self._choose(beam.group, beams, updates)

    def _choose(self, group: Group, beams: Beams, updates: dict[str, OwnerUpdate]) -> None:
        """All beams have proposed: drop those that nothing is chosen of, and let the others go on."""
        chosen = branching.choose(group, beams)
        if not chosen:
            self._end_search(group, beams, updates)
            return
        for beam in branching.drop(beams, chosen):
            self._end_one(beam)
            beam.finish(FinishReason.ABORT)
        branching.follow(group, beams, chosen, self._queues, self._blocks)

    def _end_search(self, group: Group, beams: Beams, updates: dict[str, OwnerUpdate]) -> None:
        """The best that have ended become the sequences, with all their tokens at once."""
        self._end(group, group.live)
        update = updates.setdefault(group.spec.owner, OwnerUpdate())
        self._totals.num_completion_tokens += branching.tell(group, beams.search.hypotheses, update)

    def _take_prompt_logprobs(
        self, step: StepInFlight, sequence_id: int, told: Any, updates: dict[str, OwnerUpdate]
    ) -> None:
        for sequence in step.sequences:
            if sequence.sequence_id == sequence_id and not sequence.group.is_finished:
                sequence.group.prompt_logprobs.append(told)
                first = sequence.group.sequences[0].sequence_id
                updates.setdefault(sequence.owner, OwnerUpdate()).prompt_logprobs.append((first, told))

    def _finish(self, sequence: Sequence, reason: FinishReason, update: OwnerUpdate, message: str = "") -> None:
        update.finished.append(FinishedSequence(sequence.sequence_id, reason, message))
        self._end(sequence.group, [sequence], reason)

    def _fail_sequences(self, step: StepInFlight, result: StepResult, updates: dict[str, OwnerUpdate]) -> None:
        """End those that failed alone; with a leader those that were to be forked from it, with a beam its search."""
        messages = dict(result.failures)
        if not messages:
            return
        for sequence in step.sequences:
            if sequence.sequence_id not in messages or sequence.status is SequenceStatus.FINISHED:
                continue
            group, message = sequence.group, messages[sequence.sequence_id]
            update = updates.setdefault(sequence.owner, OwnerUpdate())
            if group.unforked or group.beams:
                update.failed.append((group.spec.request_id, message))
                self.abort(group.spec.request_id)
            else:
                self._finish(sequence, FinishReason.ERROR, update, message)

    # What goes wrong

    def _fit(self, group: Group, updates: dict[str, OwnerUpdate]) -> None:
        try:
            too_long = recovery.fit(group, self.config)
        except NeverFits as error:
            updates.setdefault(group.spec.owner, OwnerUpdate()).failed.append((group.spec.request_id, str(error)))
            self._end(group, group.live)
            return
        if too_long and group.beams:
            group.beams.search.give_up(sequence.output_token_ids for sequence in too_long)
            self._end_search(group, group.beams, updates)
            return
        for sequence in too_long:
            self._finish(sequence, FinishReason.LENGTH, updates.setdefault(sequence.owner, OwnerUpdate()))

    def fail(self, request_ids: Iterable[str], message: str) -> dict[str, OwnerUpdate]:
        """End requests with an error that their owners are told."""
        updates: dict[str, OwnerUpdate] = {}
        for request_id in request_ids:
            if group := self._groups.get(request_id):
                updates.setdefault(group.spec.owner, OwnerUpdate()).failed.append((request_id, message))
                self.abort(request_id)
        return updates

    def count_outputs(self, sequence_ids: Iterable[int]) -> dict[str, int]:
        """The live requests that these sequences belong to, and how many tokens each of them has generated."""
        wanted = set(sequence_ids)
        return {
            request_id: group.num_outputs
            for request_id, group in self._groups.items()
            if any(sequence.sequence_id in wanted for sequence in group.computed)
        }

    # Room for more

    def find_room(self) -> Room:
        """What could be admitted beside what waits here already."""
        free = self._blocks.device.num_free - self._blocks.num_watermark - self._queues.num_running
        room = Room(
            self.config.max_num_batched_tokens,
            self._queues.max_rows - self._queues.num_rows,
            free,
            self.config.block_size,
        )
        for sequence in self._queues.waiting:
            room.take(len(sequence.token_ids), sequence.group.num_rows)
        first = self._queues.waiting.peek(0)
        room.has_urgent = first is not None and self._queues.is_urgent(first)
        room.outranks = lambda group: any(map(self._queues.is_urgent, group.live))
        return room

    def count_cached_tokens(self, group: Group) -> int:
        """How much of a request's prompt is found in the prefix cache here."""
        return self._blocks.count_cached_tokens(group.leader)

    # What operators see

    def stats(self) -> SchedulerStats:
        """Counts of now, and totals from the start of the process."""
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
            num_stalls_total=totals.num_stalls,
        )

    def check_integrity(self) -> None:
        """Walk all state. Raises AssertionError that says what is wrong."""
        integrity.check(self._groups, self._queues, self._blocks, list(self._in_flight), self.config)

    def _note_change(self) -> None:
        self._has_changed = True
        self._check_if_asked()

    def _check_if_asked(self) -> None:
        if self.config.debug_integrity:
            self.check_integrity()
