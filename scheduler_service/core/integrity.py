"""Checks all state of the core: what must hold between any two operations. Changes nothing."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from scheduler_service.core.sequence import Beams, Group, Sequence, SequenceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scheduler_service.core.blocks.block_manager import BlockManager
    from scheduler_service.core.config import CoreConfig
    from scheduler_service.core.queues.queues import Queues
    from scheduler_service.core.step import StepInFlight


def check(
    groups: Mapping[str, Group],
    queues: Queues,
    blocks: BlockManager,
    in_flight: list[StepInFlight],
    config: CoreConfig,
) -> None:
    """Raise AssertionError with what is wrong: leaked blocks, wrong references, two writers, a lost sequence."""
    assert len(in_flight) <= config.max_steps_in_flight, "too many steps in flight"
    live = [sequence for group in groups.values() for sequence in group.computed if not _is_finished(sequence)]
    _check_groups(groups)
    _check_queues(live, queues)
    for sequence in live:
        _check_sequence(sequence, blocks, config.num_slack_tokens)
    _check_ahead(live, in_flight, is_full=len(in_flight) == config.max_steps_in_flight)
    _check_blocks(live, blocks)
    _check_writers(live, blocks, Counter(sequence for step in in_flight for sequence in step.sampled))


def _is_finished(sequence: Sequence) -> bool:
    return sequence.status is SequenceStatus.FINISHED


def _check_groups(groups: Mapping[str, Group]) -> None:
    for request_id, group in groups.items():
        assert request_id == group.spec.request_id, f"{request_id} is another request's id"
        assert not group.is_finished, f"{request_id} has ended and is still here"
        assert not any(map(_is_finished, group.unforked)), f"{request_id} would fork a child that ended"
        if group.unforked:
            queued = [s for s in group.sequences if not _is_finished(s) and s not in group.unforked]
            assert len(queued) == 1, f"{request_id} has {len(queued)} leaders"
        if group.beams:
            _check_beams(request_id, group, group.beams)


def _check_beams(request_id: str, group: Group, beams: Beams) -> None:
    """All of one length; who has proposed has nothing to compute, and nobody is parked who will compute something."""
    sequences = beams.sequences
    assert sequences and not any(map(_is_finished, sequences)), f"{request_id} follows a beam that ended"
    assert len({len(sequence.token_ids) for sequence in sequences}) == 1, f"{request_id} has beams of two lengths"
    assert all(s.max_length == len(s.token_ids) + 1 for s in sequences), f"{request_id} would outrun its choices"
    assert beams.candidates.keys() <= set(sequences), f"{request_id} has candidates of a beam that it does not follow"
    assert not beams.has_all_candidates, f"{request_id} could choose and did not"
    ids = [*beams.free_ids, *(sequence.sequence_id for sequence in sequences)]
    assert len(set(ids)) == len(ids) == 2 * group.spec.num_rows, f"{request_id} lost ids"


def _check_queues(live: list[Sequence], queues: Queues) -> None:
    """Each live sequence stands in the one queue that its status names."""
    running = [sequence for sequence in queues.running if not _is_finished(sequence)]
    places = {
        SequenceStatus.WAITING: list(queues.waiting),
        SequenceStatus.RUNNING: running,
        SequenceStatus.SWAPPED: queues.swapped,
    }
    queued: list[Sequence] = []
    for status, sequences in places.items():
        wrong = [sequence for sequence in sequences if sequence.status is not status]
        assert not wrong, f"{wrong} stand among the {status.name}"
        queued += sequences
    expected = {s.sequence_id for s in live if s not in s.group.unforked and s.status is not SequenceStatus.PARKED}
    assert len(queued) == len(expected), "a sequence stands in no queue, or in two"
    assert {sequence.sequence_id for sequence in queued} == expected, "a sequence is lost"
    assert {id(s) for s in queues.prefilling} == {id(s) for s in running if s.is_prefilling}, "prefills are lost"
    assert queues.num_rows == sum(s.group.num_rows for s in running), "rows are lost"
    assert queues.num_beams == sum(s.group.beams is not None for s in running), "beams are miscounted"
    assert queues.num_rows <= queues.max_rows, "more rows than there are"


def _check_sequence(sequence: Sequence, blocks: BlockManager, num_slack_tokens: int) -> None:
    length, block_size = len(sequence.token_ids), blocks.block_size
    num_blocks, num_groups = len(sequence.block_ids), blocks.num_groups
    assert length <= sequence.max_length, f"{sequence} is too long"
    assert sequence.num_computed <= sequence.num_scheduled, f"{sequence} computed what was not scheduled"
    if sequence.status in (SequenceStatus.WAITING, SequenceStatus.PARKED):
        held = (*sequence.host_blocks, *sequence.fixed_ids, *sequence.fixed_host)
        assert not num_blocks and not held, f"{sequence} waits and has blocks"
        assert not sequence.num_scheduled and not sequence.num_computed, f"{sequence} waits and has KV"
        return
    if sequence.is_prefilling:
        assert sequence.num_scheduled < length, f"{sequence} has nothing left to prefill"
        needed = -(-length // block_size) * num_groups
        assert num_blocks == needed, f"{sequence} has {num_blocks} places for {length} tokens"
        ready = blocks.windows.count_writable(sequence)
        assert sequence.num_scheduled <= ready, f"{sequence} is scheduled past its blocks"
    else:
        is_over = sequence.num_scheduled >= sequence.max_length + (sequence.group.spec.pooling is not None)
        assert not is_over, f"{sequence} is scheduled past its end"
        needed = -(-sequence.num_scheduled // block_size) * num_groups
        most = -(-(sequence.num_scheduled + num_slack_tokens) // block_size) * num_groups
        assert needed <= num_blocks <= most, f"{sequence} has {num_blocks} places and needs {needed}"
    is_running = sequence.status is SequenceStatus.RUNNING
    fixed = (len(sequence.fixed_ids), len(sequence.fixed_host))
    wanted = (blocks.fixed.num_blocks, 0) if is_running else (0, blocks.fixed.num_blocks)
    assert fixed == wanted, f"{sequence} has {fixed} fixed blocks on the device and on the host"
    missing = set(blocks.windows.find_missing(sequence))
    if sequence.status is SequenceStatus.RUNNING:
        if sequence.is_prefilling:
            # It gets the blocks that it has given back with the next step.
            missing = {place for place in missing if place // num_groups < sequence.num_ready}
        assert not missing and not sequence.host_blocks, f"{sequence} runs and is not all on the device"
    filled = -(-sequence.num_scheduled // block_size) * num_groups
    # The host may also hold blocks that only wrong drafts have written to.
    is_all_there = {p for p in missing if p < filled} <= sequence.host_blocks.keys() <= missing
    assert is_all_there, f"{sequence} lost content"
    assert num_slack_tokens or all(p < filled for p in sequence.host_blocks), f"{sequence} keeps what it has no use for"
    _check_windows(sequence, blocks)


def _check_ahead(live: list[Sequence], in_flight: list[StepInFlight], *, is_full: bool) -> None:
    """A decode has been scheduled as far as the steps in flight bring it at most, and never waits for drafts alone."""
    num_ahead = Counter[Sequence]()
    for step in in_flight:
        for sequence, num_drafts in zip(step.sampled, step.find_drafts(step.sampled), strict=True):
            num_ahead[sequence] += 1 + num_drafts
    for sequence in live:
        has_started = sequence.status in (SequenceStatus.RUNNING, SequenceStatus.SWAPPED)
        if not has_started or sequence.is_prefilling or sequence.group.beams or sequence.group.spec.pooling is not None:
            continue
        expected = len(sequence.token_ids) - 1 + num_ahead[sequence]
        assert sequence.num_scheduled == expected, f"{sequence} is scheduled, and the steps in flight say {expected}"
        is_sure = num_ahead[sequence] == sum(sequence in step.sampled for step in in_flight)
        assert is_full or is_sure or not sequence.has_last_in_flight, f"{sequence} would wait for drafts"


def _check_windows(sequence: Sequence, blocks: BlockManager) -> None:
    """No block is held that no query will see any more, nor one ahead that is not yet due."""
    groups = blocks.groups
    for place, block in enumerate(sequence.block_ids):
        window, index = groups.windows[place % groups.num_groups], place // groups.num_groups
        if window and (block or place in sequence.host_blocks):
            num_full = sequence.publish_at // groups.block_size - 1
            assert index >= groups.first_kept(window, num_full), f"{sequence} holds what is behind a window"
            is_ready = not sequence.is_prefilling or index < sequence.num_ready
            assert is_ready, f"{sequence} holds what it has no use for yet"


def _check_blocks(live: list[Sequence], blocks: BlockManager) -> None:
    """References are the tables, and nothing else."""
    fixed = [block for sequence in live for block in sequence.fixed_ids]
    assert not any(map(blocks.device.is_published, fixed)), "a fixed block is found by a hash"
    tables = {block for sequence in live for block in sequence.block_ids if block}
    assert len({*fixed, *tables}) == len(fixed) + len(tables), "a fixed block has two holders"
    held = chain(fixed, blocks.fixed.held_sources, blocks.snapshots.held)
    blocks.device.check(_count(chain(held, (block for sequence in live for block in sequence.block_ids if block))))
    on_host = chain.from_iterable(chain(sequence.host_blocks.values(), sequence.fixed_host) for sequence in live)
    blocks.host.check(_count(chain(on_host, blocks.spilled)))


def _count(blocks: Iterable[int]) -> dict[int, int]:
    return dict(Counter(blocks))


def _check_writers(live: list[Sequence], blocks: BlockManager, num_in_flight: Mapping[Sequence, int]) -> None:
    """A block that a running sequence will write next is its own and is not found by hash, or it will be copied."""
    size = blocks.block_size
    for sequence in live:
        if sequence.status is not SequenceStatus.RUNNING:
            continue
        first = sequence.num_scheduled
        if sequence in num_in_flight and not sequence.is_prefilling:
            # All drafts in flight may be wrong.
            first = min(first, len(sequence.token_ids) - 1 + num_in_flight[sequence])
        for block in filter(None, sequence.block_ids[first // size * blocks.num_groups :]):
            is_own = blocks.device.references[block] == 1 and not blocks.device.is_published(block)
            is_copied_first = not sequence.is_prefilling and sequence.grow_at == sequence.num_scheduled
            assert is_own or is_copied_first, f"{sequence} would write into block {block}, which is not its own"
