"""Applies the answer to a step: computed KV, tokens, finished sequences. Knows nothing of the next step."""

from __future__ import annotations

from itertools import chain, repeat
from operator import sub
from typing import TYPE_CHECKING, Any

from blockyard.contract.sampling import FinishReason, PredictionUsage
from blockyard.contract.scheduling import Prefill, SequenceError
from scheduler_service.core.sequence import Sequence, SequenceStatus
from scheduler_service.core.values import OwnerUpdate, StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scheduler_service.core.blocks.block_manager import BlockManager
    from scheduler_service.core.live_groups import LiveGroups, Totals
    from scheduler_service.core.step import StepInFlight


class Answers:
    """Applies answers, each of which was checked against its step."""

    __slots__ = ("_blocks", "_live", "_totals")

    def __init__(self, live: LiveGroups, blocks: BlockManager, totals: Totals) -> None:
        self._live = live
        self._blocks = blocks
        self._totals = totals

    def take(self, step: StepInFlight, sampled: list[Sequence], result: StepResult) -> dict[str, OwnerUpdate]:
        """Applies one answer. `sampled`: the sequences that got its tokens. Returns the update of each owner."""
        updates: dict[str, OwnerUpdate] = {}
        self._report_prefills(step, updates)
        failed = {sequence_id for sequence_id, _ in result.failures}
        for sequence, num_computed in step.pieces:
            if sequence.sequence_id not in failed:
                self._commit_piece(sequence, num_computed)
        # Before the tokens, since a token may end the request that the prompt belongs to.
        for sequence_id, piece in result.prompt_logprobs:
            self._take_prompt_logprobs(step, sequence_id, piece, updates)
        if result.predictions:
            self._count_predictions(step, result, updates)
        lengths = [(sequence, len(sequence.token_ids)) for sequence in sampled] if result.logprobs else []
        if step.drafts:
            counts = result.num_tokens or (1,) * len(sampled)
            self._take_tokens(chain.from_iterable(map(repeat, sampled, counts)), result.token_ids, updates)
            _take_back(sampled, step.find_drafts(sampled), counts)
        else:
            self._take_tokens(sampled, result.token_ids, updates)
        if step.pooled:
            self._take_pooled(step.pooled, dict(result.pooled), updates)
        if step.beams:
            self._take_candidates(step.beams, result.beam_candidates or {}, updates)
        if result.logprobs:
            self._take_logprobs(lengths, result.logprobs, updates)
        if result.failures:
            self._fail_sequences(step, dict(result.failures), updates)
        if self._blocks.snapshots.every:
            self._blocks.snapshots.publish(step.step_id)
        return updates

    def _report_prefills(self, step: StepInFlight, updates: dict[str, OwnerUpdate]) -> None:
        for group in step.completed:
            if group.is_finished or group.is_prefilled:
                continue
            group.is_prefilled = True
            update = updates.setdefault(group.spec.owner, OwnerUpdate())
            update.prefilled.append(Prefill(group.sequences[0].sequence_id, group.num_cached_tokens))
            self._totals.num_prompt_tokens += group.prompt_length
            if not group.spec.computes_prompt:
                self._totals.num_queried_tokens += group.prompt_length
            self._totals.num_cached_tokens += group.num_cached_tokens

    def _commit_piece(self, sequence: Sequence, num_computed: int) -> None:
        """Counts the KV of a piece of a prefill, unless the sequence was restarted meanwhile."""
        if sequence.status is SequenceStatus.RUNNING or sequence.status is SequenceStatus.SWAPPED:
            sequence.num_computed = num_computed
        if sequence.status is SequenceStatus.RUNNING:
            self._blocks.publish(sequence)

    def _take_tokens(
        self, sequences: Iterable[Sequence], token_ids: tuple[int, ...], updates: dict[str, OwnerUpdate]
    ) -> None:
        """Appends one token to each sequence; one that comes several times gets several. The hot loop.

        A step samples a sequence if it computes the last known token, so all tokens known before have KV afterwards.
        Those of a run have it as well, since they were drafted.
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
                self._live.finish(sequence, FinishReason.STOP, update)
            elif length + 1 >= sequence.max_length:
                self._live.finish(sequence, FinishReason.LENGTH, update)
        self._totals.num_completion_tokens += num_taken

    def _count_predictions(self, step: StepInFlight, result: StepResult, updates: dict[str, OwnerUpdate]) -> None:
        """Counts what was drafted by what requests predict. The owner is told beside the tokens that it brought."""
        by_id = dict(zip(step.sampled_ids, step.sampled, strict=True))
        for sequence_id, num_drafted, num_accepted in result.predictions:
            sequence = by_id[sequence_id]
            if sequence.status is not SequenceStatus.FINISHED:
                before = sequence.prediction or PredictionUsage()
                sequence.prediction = now = before.plus(num_accepted, num_drafted - num_accepted)
                updates.setdefault(sequence.owner, OwnerUpdate()).predictions.append((sequence_id, now))

    def _take_logprobs(
        self,
        lengths: list[tuple[Sequence, int]],
        logprobs: tuple[tuple[int, Any], ...],
        updates: dict[str, OwnerUpdate],
    ) -> None:
        """Takes the log probabilities of the tokens that were taken; `lengths`: of the sequences, before."""
        by_sequence: dict[int, list[Any]] = {}
        for sequence_id, candidates in logprobs:
            by_sequence.setdefault(sequence_id, []).append(candidates)
        for sequence, length in lengths:
            # A sequence that has ended got no token, or only the first ones.
            num_taken = len(sequence.token_ids) - length
            for candidates in by_sequence.get(sequence.sequence_id, ())[:num_taken]:
                sequence.logprobs.append(candidates)
                updates[sequence.owner].logprobs.append((sequence.sequence_id, candidates))

    def _take_pooled(
        self, sequences: list[Sequence], numbers: Mapping[int, bytes], updates: dict[str, OwnerUpdate]
    ) -> None:
        """Takes pooled numbers, which end their sequence. They are valid even if it was restarted meanwhile."""
        for sequence in sequences:
            values = numbers.get(sequence.sequence_id)
            if values is None or sequence.status is SequenceStatus.FINISHED:
                continue
            self._commit_piece(sequence, len(sequence.token_ids))
            sequence.pooled = values
            update = updates.setdefault(sequence.owner, OwnerUpdate())
            update.pooled.append((sequence.sequence_id, values))
            self._live.finish(sequence, FinishReason.STOP, update)

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
                self._live.advance(beam.group, beams, updates)

    def _take_prompt_logprobs(
        self, step: StepInFlight, sequence_id: int, piece: Any, updates: dict[str, OwnerUpdate]
    ) -> None:
        for sequence in step.sequences:
            if sequence.sequence_id == sequence_id and not sequence.group.is_finished:
                sequence.group.prompt_logprobs.append(piece)
                first = sequence.group.sequences[0].sequence_id
                updates.setdefault(sequence.owner, OwnerUpdate()).prompt_logprobs.append((first, piece))

    def _fail_sequences(
        self, step: StepInFlight, errors: Mapping[int, SequenceError], updates: dict[str, OwnerUpdate]
    ) -> None:
        for sequence in step.sequences:
            if sequence.sequence_id in errors and sequence.status is not SequenceStatus.FINISHED:
                self._live.fail_sequence(sequence, errors[sequence.sequence_id], updates)


def _take_back(sampled: list[Sequence], drafts: tuple[int, ...], counts: tuple[int, ...]) -> None:
    """Takes back what a step might have brought and did not. A sequence that has started over has no such tokens.

    It cannot run again before this answer, since a sequence in flight does not begin.
    """
    running, swapped = SequenceStatus.RUNNING, SequenceStatus.SWAPPED
    for sequence, num_wrong in zip(sampled, map(sub, drafts, counts), strict=True):
        # -1: all are right.
        if num_wrong >= 0 and (sequence.status is running or sequence.status is swapped):
            sequence.num_scheduled -= num_wrong + 1
