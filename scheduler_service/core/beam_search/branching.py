"""Applies a beam search's choice to sequences: forks, rows and queues. Knows nothing of scores and answers.

A beam with one chosen continuation stays the same sequence. For each further continuation a child is forked from it,
which shares its blocks. A child whose parent has lost its blocks, or for which no row is free, waits for its prefill.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import Ending, SequenceError
from scheduler_service.core.sequence import Beams, Group, Sequence, SequenceStatus

if TYPE_CHECKING:
    from scheduler_service.core.beam_search.beams import Continuation, Hypothesis
    from scheduler_service.core.blocks.block_manager import BlockManager
    from scheduler_service.core.queues.queues import Queues
    from scheduler_service.core.values import OwnerUpdate

# A search ends early only if masks leave its beams no token.
TOO_FEW = SequenceError("NO_TOKEN_POSSIBLE", "fewer continuations are possible than were asked for")


def choose(group: Group, beams: Beams) -> list[Continuation]:
    """Chooses continuations, the best first, once all beams have proposed. Empty: the search is over."""
    ranked = beams.sequences
    return beams.search.advance(
        [beams.candidates[beam] for beam in ranked],
        lambda rank: ranked[rank].output_token_ids,
        group.max_length - group.prompt_length,
    )


def drop(beams: Beams, chosen: list[Continuation]) -> list[Sequence]:
    """Returns the beams without a chosen continuation, for the caller to end. Their ids become free."""
    followed = {one.rank for one in chosen}
    dropped = [beam for rank, beam in enumerate(beams.sequences) if rank not in followed]
    beams.free_ids.extend(beam.sequence_id for beam in dropped)
    return dropped


def follow(beams: Beams, chosen: list[Continuation], queues: Queues, blocks: BlockManager) -> None:
    """Makes the chosen continuations the beams. Dropped beams have ended already, and their rows are free."""
    if not beams.has_branched:
        queues.split_rows(beams.sequences[0])
        beams.has_branched = True
    parents = beams.sequences
    going_on: set[int] = set()
    beams.sequences = []
    for one in chosen:
        parent = parents[one.rank]
        beams.sequences.append(_make_child(parent, beams, queues, blocks) if one.rank in going_on else parent)
        going_on.add(one.rank)
    for beam, one in zip(beams.sequences, chosen, strict=True):
        beam.token_ids.append(one.token_id)
        beam.max_length = len(beam.token_ids) + 1
    beams.candidates.clear()
    for beam in reversed(beams.sequences):
        if beam.status is SequenceStatus.PARKED:
            queues.start_over(beam)


def _make_child(parent: Sequence, beams: Beams, queues: Queues, blocks: BlockManager) -> Sequence:
    child = beams.make_sequence(parent.group)
    if parent.status is SequenceStatus.RUNNING and queues.num_rows < queues.max_rows and blocks.fixed.has_room:
        blocks.fork(parent, child)
        child.is_prefilling = False
        child.forked_from = parent
        queues.branch(parent, child)
    else:
        child.status = SequenceStatus.PARKED
        child.token_ids = parent.token_ids.copy()
        child.block_hashes = parent.block_hashes.copy()
    return child


def emit(group: Group, hypotheses: list[Hypothesis], update: OwnerUpdate) -> int:
    """Gives a group's ended sequences the best hypotheses. Returns the number of their tokens."""
    num_tokens = 0
    for sequence, hypothesis in zip_longest(group.sequences, hypotheses[: len(group.sequences)]):
        if hypothesis is None:
            sequence.finish_reason, sequence.error = FinishReason.ERROR, TOO_FEW
            update.ended.append(Ending(sequence.sequence_id, FinishReason.ERROR, error=TOO_FEW))
            continue
        sequence.token_ids = [*group.spec.prompt_token_ids, *hypothesis.token_ids]
        sequence.finish_reason, sequence.score = hypothesis.reason, hypothesis.score
        update.sequence_ids.extend([sequence.sequence_id] * len(hypothesis.token_ids))
        update.token_ids.extend(hypothesis.token_ids)
        end = Ending(sequence.sequence_id, hypothesis.reason, score=hypothesis.score)
        update.ended.append(end)
        num_tokens += len(hypothesis.token_ids)
    return num_tokens
