"""Moves a sequence's blocks to the host and back. Does not choose which sequence is preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core.values import BlockPair

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core.blocks.block_pool import BlockPool
    from scheduler_service.core.blocks.fixed import FixedBlocks
    from scheduler_service.core.blocks.host_tier import HostTier
    from scheduler_service.core.blocks.prefix_lookup import PrefixLookup
    from scheduler_service.core.blocks.windows import WindowBlocks
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.step import StepBuilder


class Swapping:
    """Swaps the blocks of one sequence at a time. `allocate` hands out a free device block."""

    __slots__ = ("_allocate", "_device", "_fixed", "_groups", "_prefixes", "_tier", "_windows")

    def __init__(
        self,
        windows: WindowBlocks,
        fixed: FixedBlocks,
        device: BlockPool,
        tier: HostTier,
        prefixes: PrefixLookup,
        allocate: Callable[[], int],
    ) -> None:
        self._windows = windows
        self._groups = windows.groups
        self._fixed = fixed
        self._device = device
        self._tier = tier
        self._prefixes = prefixes
        self._allocate = allocate

    def swap_out(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Moves what only this sequence holds to the host; shared blocks stay held.

        Returns False, without change, if the host has no room or nothing would move. Steps in flight may still write
        into these blocks; they are executed before this one, so their content is moved.
        """
        num_filled = -(-sequence.num_scheduled // self._groups.block_size) * self._groups.num_groups
        places = [p for p, block in enumerate(sequence.block_ids) if self._device.references[block] == 1]
        num_moved = sum(place < num_filled for place in places)
        if self._fixed.num_blocks:
            # Before the first token they hold nothing.
            num_moved += self._fixed.num_blocks if sequence.num_scheduled else 0
            if not self._fixed.is_complete(sequence):
                return False
        if not num_moved or not self._tier.make_room(num_moved):
            return False
        if self._fixed.num_blocks:
            self._fixed.swap_out(sequence, step)
        num_published = self._prefixes.count_published(sequence)
        for place in reversed(places):
            block = sequence.block_ids[place]
            if place < num_filled:
                block_hash = self._prefixes.hash(sequence, place) if place < num_published else None
                sequence.host_blocks[place] = self._tier.keep(block, block_hash, step)
            self._device.release(block)
            sequence.block_ids[place] = 0
        return True

    def swap_in(self, sequence: Sequence, step: StepBuilder, num_spare: int) -> bool:
        """Brings a sequence's blocks back to the device. Returns False if fewer than `num_spare` would stay free.

        The block that its next token may need is counted, but not allocated.
        """
        if self._groups.widest:
            self._windows.catch_up(sequence)
        missing = self._windows.find_missing(sequence)
        num_needed = len(missing) + self._fixed.num_blocks + self._count_growth(sequence)
        if num_needed + num_spare > self._device.num_free:
            return False
        if self._fixed.num_blocks:
            self._fixed.swap_in(sequence, step)
        for place in missing:
            sequence.block_ids[place] = self._restore(sequence, place, step)
        self._tier.hand_over(reversed(sequence.host_blocks.values()))
        sequence.host_blocks = {}
        step.replaced[sequence.sequence_id] = sequence
        sequence.grow_at = self._groups.count_slots(len(sequence.block_ids))
        return True

    def _count_growth(self, sequence: Sequence) -> int:
        """Counts the blocks that the sequence's next token takes."""
        if sequence.is_prefilling:
            return 0
        num_groups = self._groups.num_groups
        if sequence.num_scheduled * num_groups == len(sequence.block_ids) * self._groups.block_size:
            return num_groups
        return sum(self._device.references[block] > 1 for block in sequence.block_ids[-num_groups:] if block)

    def _restore(self, sequence: Sequence, place: int, step: StepBuilder) -> int:
        """Returns a device block with the content of this place: found by its hash, from the host, or to be filled."""
        is_known = place < self._prefixes.count_published(sequence) and not self._windows.reserves(sequence, place)
        if is_known:
            block = self._device.find(self._prefixes.hash(sequence, place))
            if block is not None:
                self._device.share(block)
                return block
        block = self._allocate()
        if place in sequence.host_blocks:
            step.swap_in.append(BlockPair(sequence.host_blocks[place], block))
            if is_known:
                self._device.publish(block, self._prefixes.hash(sequence, place))
        return block
