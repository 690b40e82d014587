"""The live requests of a scheduler, and how they end. Knows neither steps nor answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import Ending, SequenceError
from scheduler_service.core.beam_search import branching
from scheduler_service.core.sequence import Beams, Group, Sequence, SequenceStatus
from scheduler_service.core.values import NO_DRAFTS, DraftCounts, OwnerUpdate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.blocks.block_manager import BlockManager
    from scheduler_service.core.queues.queues import Queues


@dataclass(slots=True)
class Totals:
    """Counts since the start of the process."""

    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_copied_blocks: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    num_queried_tokens: int = 0
    num_completion_tokens: int = 0
    num_given_back_blocks: int = 0
    drafts: DraftCounts = NO_DRAFTS

    def add(self, others: Totals) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(others, field.name))


class LiveGroups:
    """Groups by request id. A sequence that ends leaves its queue and its blocks.

    `ended_ids`: sequences that the worker knows and must forget.
    """

    __slots__ = ("_blocks", "_ended_groups", "_queues", "_totals", "ended_ids", "groups")

    def __init__(self, queues: Queues, blocks: BlockManager, totals: Totals) -> None:
        self._queues = queues
        self._blocks = blocks
        self._ended_groups: list[Group] = []
        self.groups: dict[str, Group] = {}
        self.ended_ids: list[int] = []
        self._totals = totals

    def add(self, group: Group) -> None:
        """Queues a group: all its sequences except unforked and parked ones."""
        self.groups[group.spec.request_id] = group
        for sequence in group.live:
            if sequence not in group.unforked and sequence.status is not SequenceStatus.PARKED:
                self._queues.waiting.push(sequence)

    def clear(self) -> None:
        self.groups.clear()
        self.ended_ids = []

    def take_ended(self) -> list[Group]:
        ended, self._ended_groups = self._ended_groups, []
        return ended

    def take_ended_ids(self) -> list[int]:
        """Takes the ids of sequences that ended since the last call and that the worker knows."""
        ended, self.ended_ids = self.ended_ids, []
        return ended

    def end(
        self,
        group: Group,
        sequences: Iterable[Sequence],
        reason: FinishReason = FinishReason.ABORT,
        num_tokens: int | None = None,
    ) -> None:
        """Ends these live sequences of a group, unforked children first."""
        for sequence in sorted(sequences, key=lambda sequence: sequence not in group.unforked):
            self._leave(sequence)
            sequence.finish(reason, num_tokens)
        if group.beams:
            group.end_search(reason)
        if group.is_finished:
            del self.groups[group.spec.request_id]
            self._ended_groups.append(group)

    def _leave(self, sequence: Sequence) -> None:
        group = sequence.group
        if sequence in group.unforked:
            self._queues.drop_child(sequence)
        elif group.unforked:
            self._queues.replace_leader(sequence)
        else:
            self._queues.remove(sequence)
        self._blocks.free(sequence)
        if sequence.is_known:
            self.ended_ids.append(sequence.sequence_id)

    def finish(self, sequence: Sequence, reason: FinishReason, update: OwnerUpdate) -> None:
        update.ended.append(Ending(sequence.sequence_id, reason))
        self.end(sequence.group, [sequence], reason)

    def fail_sequence(self, sequence: Sequence, error: SequenceError, updates: dict[str, OwnerUpdate]) -> None:
        """Ends a sequence that failed by itself, and adds that to its owner's update.

        A leader takes its unforked children with it, since they sample from its logits; a beam takes its whole search.
        """
        group = sequence.group
        failed, ended = [sequence], [sequence]
        if group.unforked or group.beams:
            failed, ended = [each for each in group.sequences if each.finish_reason is None], group.live
        update = updates.setdefault(sequence.owner, OwnerUpdate())
        for each in failed:
            each.error = error
            update.ended.append(Ending(each.sequence_id, FinishReason.ERROR, error=error))
        self.end(group, ended, FinishReason.ERROR)

    def fail(self, group: Group, message: str, updates: dict[str, OwnerUpdate]) -> None:
        """Fails a group that can never fit."""
        updates.setdefault(group.spec.owner, OwnerUpdate()).failed.append((group.spec.request_id, message))
        self.end(group, group.live)

    # Beam search

    def advance(self, group: Group, beams: Beams, updates: dict[str, OwnerUpdate]) -> None:
        """Continues a search once all beams have proposed, and drops the beams without a chosen continuation."""
        chosen = branching.choose(group, beams)
        if not chosen:
            self.end_search(group, beams, updates)
            return
        for beam in branching.drop(beams, chosen):
            self._leave(beam)
            beam.finish(FinishReason.ABORT)
        branching.follow(beams, chosen, self._queues, self._blocks)

    def end_search(self, group: Group, beams: Beams, updates: dict[str, OwnerUpdate]) -> None:
        """Ends a search: its best hypotheses become the sequences, with all their tokens at once."""
        self.end(group, group.live)
        update = updates.setdefault(group.spec.owner, OwnerUpdate())
        self._totals.num_completion_tokens += branching.emit(group, beams.search.hypotheses, update)
