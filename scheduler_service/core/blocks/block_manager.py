"""Hands KV blocks to sequences. Owns both pools; knows nothing of queues, budgets and the order of sequences.

Every method with a `step` writes there what the worker must do: grown and replaced tables, swaps and copies. The worker
swaps out, then swaps in, then copies. Therefore:

- a device block that is swapped out, or evicted to the host, may be handed out again within the step;
- the source of a copy stays held until the step is complete, or a swap-in or another copy would overwrite it.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.blocks.fixed import FixedBlocks
from scheduler_service.core.blocks.host_tier import HostTier
from scheduler_service.core.blocks.prefix_lookup import Prefix, PrefixLookup
from scheduler_service.core.blocks.snapshots import Snapshots
from scheduler_service.core.blocks.swapping import Swapping
from scheduler_service.core.blocks.windows import WindowBlocks
from scheduler_service.core.values import BlockPair, CacheReset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Many

    from scheduler_service.core.config import CoreConfig
    from scheduler_service.core.cost import CostModel
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.step import StepBuilder


class BlockManager:
    __slots__ = (
        "_held_device",
        "_last_places",
        "_prefixes",
        "_swapping",
        "_tier",
        "block_size",
        "device",
        "fixed",
        "groups",
        "has_windows",
        "host",
        "num_groups",
        "num_watermark",
        "snapshots",
        "usage",
        "windows",
    )

    def __init__(self, config: CoreConfig, costs: CostModel) -> None:
        self.block_size = config.block_size
        self.groups = config.kv_groups
        self.num_groups = self.groups.num_groups
        self.has_windows = self.groups.widest > 0
        self._last_places = range(-self.num_groups, 0)
        self.device = BlockPool(config.num_device_blocks, first_block=1)
        self.num_watermark = int(config.watermark * self.device.num_usable)
        caches = config.enable_prefix_caching and not config.whole_prompts
        # A prefix is of no use without the state behind it.
        distance = config.snapshot_distance if caches else 0
        caches = caches and (distance > 0 or not config.num_state_blocks)
        self._tier = HostTier(config.num_host_blocks, caches=caches and config.enable_host_prefix_cache)
        self.host = self._tier.pool
        self._prefixes = PrefixLookup(
            self.groups, self.device, self._tier, costs, is_enabled=caches, snapshot_distance=distance
        )
        self._prefixes.weights_version = config.weights_version
        self.windows = WindowBlocks(self.groups, self.device, self.host, self._prefixes, self._allocate)
        self.fixed = FixedBlocks(config.num_state_blocks, self.device, self._tier, self._allocate)
        self.snapshots = Snapshots(distance, self.device, self._prefixes, self._allocate)
        self._swapping = Swapping(self.windows, self.fixed, self.device, self._tier, self._prefixes, self._allocate)
        self.usage = BlockUsage(self.device)
        self._held_device: dict[int, int] = {}

    def reset(self) -> None:
        self.device.reset()
        self._tier.reset()
        self.fixed.reset()
        self.snapshots.reset()
        self._held_device.clear()

    def reset_prefix_cache(self) -> CacheReset:
        """Forgets the content of free blocks. Blocks of sequences keep their hashes, which the sequences rely on."""
        return CacheReset(
            self.device.forget_evictable(),
            self.host.forget_evictable(),
            self.device.num_cached,
            self.host.num_cached,
        )

    def settle(self, step: StepBuilder) -> None:
        """Adds the last cache operations to a complete step, and releases the blocks that only operations held."""
        if self.fixed.num_blocks:
            if self.snapshots.every:
                # Steps in flight need blocks before the answer that makes these evictable.
                num_spare = max(self.num_watermark, 2 * len(step.rows) * self.num_groups)
                self.snapshots.take(step, self.fixed.find_due(step), num_spare)
            self.fixed.settle(step)
        for block, count in self._held_device.items():
            for _ in range(count):
                self.device.release(block)
        self._held_device.clear()
        if self._tier.held or self._tier.spills:
            self._tier.settle(step)

    @property
    def spilled(self) -> Iterator[int]:
        """The host blocks that the next step writes: between two steps a beam that branches may evict content."""
        return (pair.destination for pair in self._tier.spills.values())

    def _allocate(self) -> int:
        """Allocates a device block. Content evicted for it goes to the host if that pays."""
        forgotten = self.device.next_forgotten
        block = self.device.allocate()
        if forgotten is not None and self._prefixes.uses_host:
            self._tier.spill(block, forgotten)
        return block

    # Admission

    def admit(self, sequence: Sequence, step: StepBuilder, num_spare: int) -> bool:
        """Allocates blocks for a sequence's known tokens, with cached ones first.

        Returns False if fewer than `num_spare` blocks would stay free.
        """
        prefix = self._prefixes.find(sequence)
        num_blocks = self._count_blocks(sequence)
        fits = self._count_needed(prefix, num_blocks) + num_spare <= self.device.num_free
        # A cached prefix and the blocks of windows, or the cached blocks and copies, may not even fit alone.
        if not fits and (num_spare or not (prefix := self._shorten(prefix, num_blocks))):
            return False
        self._take(sequence, prefix, num_blocks, step)
        return True

    def _shorten(self, prefix: Prefix, num_blocks: int) -> Prefix | None:
        """Shortens the prefix so that a sequence fits that leaves nothing free. Returns None if it cannot."""
        if self.has_windows or prefix.states:
            prefix = Prefix([], {}, num_reached=prefix.num_reached)
        elif prefix.find_shared(num_blocks, 1):
            prefix.block_ids.pop()
        else:
            return None
        # Beside others, pooled prompts leave nothing free as well.
        return prefix if self._count_needed(prefix, num_blocks) <= self.device.num_free else None

    def count_spare(self, sequence: Sequence, num_running: int) -> int:
        """Returns how many blocks must stay free when a sequence begins beside `num_running` others.

        For a preempted sequence, one block of each KV group for each of the others: otherwise it would be the next
        victim at once. 0 for a sequence that never grows.
        """
        if not num_running or sequence.group.spec.pooling is not None:
            return 0
        return max(self.num_watermark, num_running * self.num_groups) if sequence.is_known else self.num_watermark

    def count_beside(self, sequence: Sequence, num_running: int) -> int:
        """Returns `count_spare`, the blocks of the next tokens of its group, and the fixed ones of children."""
        grows = num_running and sequence.group.spec.pooling is None
        num_rows = sequence.group.num_rows
        num_next = num_rows * self.num_groups + (num_rows - 1) * self.fixed.num_blocks if grows else 0
        return self.count_spare(sequence, num_running) + num_next

    def count_missing(self, sequence: Sequence) -> int:
        """Counts the free blocks that admitting a sequence takes."""
        return self._count_needed(self._prefixes.find(sequence), self._count_blocks(sequence))

    def _count_blocks(self, sequence: Sequence) -> int:
        return -(-len(sequence.token_ids) // self.block_size)

    def count_cached_tokens(self, sequence: Sequence) -> int:
        prefix = self._prefixes.find(sequence)
        return prefix.position or self.groups.count_full(prefix.block_ids) * self.block_size

    def _count_needed(self, prefix: Prefix, num_blocks: int) -> int:
        """Counts the free blocks that this prefix, the other blocks and a copy of a shared last block take."""
        references, num_found = self.device.references, self.groups.count_full(prefix.block_ids)
        num_free_hits = sum(block > 0 and not references[block] for block in prefix.block_ids)
        num_free_hits += sum(block > 0 and not references[block] for block, _ in prefix.states)
        num_ready = self.groups.count_ready(num_found, num_found, num_blocks)
        num_filled = sum((num_ready if window else num_blocks) - num_found for window in self.groups.windows)
        num_copies = len(prefix.find_shared(num_blocks * self.num_groups, self.num_groups))
        return num_free_hits + num_filled + len(prefix.host_blocks) + num_copies + self.fixed.num_blocks

    def _take(self, sequence: Sequence, prefix: Prefix, num_blocks: int, step: StepBuilder) -> None:
        table, host_blocks = prefix.block_ids, prefix.host_blocks
        for block in table:
            if block:
                self.device.share(block)
        for block in host_blocks.values():
            self._tier.read(block)
        if self.fixed.num_blocks:
            self._take_fixed(sequence, prefix, step)
        num_tokens, num_groups, num_found = len(sequence.token_ids), self.num_groups, self.groups.count_full(table)
        num_cached = prefix.position or min(num_found * self.block_size, num_tokens - 1)
        for place in prefix.find_shared(num_blocks * num_groups, num_groups):
            table[place] = self._copy(table[place], step)
        for place, host_block in host_blocks.items():
            table[place] = self._allocate()
            step.swap_in.append(BlockPair(host_block, table[place]))
            if (
                place // num_groups + 1
            ) * self.block_size <= num_cached:  # otherwise a token of it will be computed again
                self.device.publish(table[place], sequence.block_hashes[place])
        num_full = num_cached // self.block_size
        num_ready = self.groups.count_ready(num_found, num_full, num_blocks)
        for index in range(num_found, num_blocks):
            for window in self.groups.windows:
                table.append(0 if window and index >= num_ready else self._allocate())
        sequence.block_ids = table
        sequence.num_found, sequence.num_ready = num_found, num_ready
        sequence.grow_at = self.groups.count_slots(len(table))
        sequence.num_scheduled = sequence.num_computed = num_cached
        is_watched = self.num_groups and (self._prefixes.is_enabled or self.has_windows)
        sequence.publish_at = (num_full + 1) * self.block_size if is_watched else sys.maxsize

    def _take_fixed(self, sequence: Sequence, prefix: Prefix, step: StepBuilder) -> None:
        """Allocates a sequence's fixed blocks, and fills them with the state that is cached, if there is one."""
        for block, host_block in prefix.states:
            if host_block is None:
                self.device.share(block)
                self._held_device[block] = self._held_device.get(block, 0) + 1
            else:
                self._tier.read(host_block)
        self.fixed.take(sequence)
        if self.snapshots.every:
            self.snapshots.plan(sequence, prefix)
        for (block, host_block), fixed in zip(prefix.states, sequence.fixed_ids, strict=False):
            if host_block is None:
                step.copies.append(BlockPair(block, fixed))
            else:
                step.swap_in.append(BlockPair(host_block, fixed))

    # Growth

    def grow(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Makes the next token's slots writable, by new blocks or copies of shared ones. False: no block is free."""
        table, num_groups = sequence.block_ids, self.num_groups
        capacity = len(table) // num_groups * self.block_size if num_groups else sys.maxsize
        if sequence.num_scheduled == capacity:
            if self.device.num_free < num_groups:
                return False
            for _ in self._last_places:
                block = self._allocate()
                table.append(block)
                step.add_appended(sequence, block)
            capacity += self.block_size
        elif shared := [place for place in self._last_places if self._is_shared(table[place])]:
            if self.device.num_free < len(shared):
                return False
            for place in shared:
                table[place] = self._copy(table[place], step)
            step.replaced[sequence.sequence_id] = sequence
        sequence.grow_at = capacity
        return True

    def extend(self, sequence: Sequence, num_tokens: int, num_spare: int, step: StepBuilder) -> int:
        """Makes room for tokens behind those scheduled, as long as `num_spare` blocks stay free. Returns for how many.

        The last block is the sequence's own: a decode is scheduled in it.
        """
        capacity = self.groups.count_slots(len(sequence.block_ids))
        end = sequence.num_scheduled + num_tokens
        while capacity < end and self.device.num_free - self.num_groups >= num_spare:
            for _ in self._last_places:
                block = self._allocate()
                sequence.block_ids.append(block)
                step.add_appended(sequence, block)
            capacity += self.block_size
        sequence.grow_at = capacity
        return min(end, capacity) - sequence.num_scheduled

    def _is_shared(self, block: int) -> bool:
        return self.device.references[block] - self._held_device.get(block, 0) > 1

    def _copy(self, source: int, step: StepBuilder) -> int:
        """Makes a private copy. The holder's reference to the source passes to the step."""
        destination = self._allocate()
        step.copies.append(BlockPair(source, destination))
        self._held_device[source] = self._held_device.get(source, 0) + 1
        return destination

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Starts a child at its parent's position, with the same blocks. There must be room for its fixed ones."""
        for block in filter(None, parent.block_ids):
            self.device.share(block)
        child.token_ids = parent.token_ids.copy()
        child.block_ids = parent.block_ids.copy()
        child.block_hashes = parent.block_hashes.copy()
        child.num_scheduled = parent.num_scheduled
        child.num_computed = parent.num_computed
        child.publish_at = parent.publish_at
        child.num_ready = parent.num_ready
        parent.grow_at = child.grow_at = parent.num_scheduled
        if self.fixed.num_blocks:
            self.fixed.fork(parent, child)

    # Content

    def publish(self, sequence: Sequence) -> None:
        """Makes a sequence's full computed blocks findable, and releases those behind windows."""
        if self.has_windows:
            self.windows.publish(sequence)
            return
        while sequence.publish_at <= sequence.num_computed:
            place = sequence.publish_at // self.block_size - 1
            self.device.publish(sequence.block_ids[place], self._prefixes.hash(sequence, place))
            sequence.publish_at += self.block_size

    # Giving back

    def free(self, sequence: Sequence) -> None:
        """Releases all blocks of a sequence. Published blocks count as just used, the last ones first."""
        num_published = self._prefixes.count_published(sequence)
        for place in range(len(sequence.block_ids) - 1, -1, -1):
            block = sequence.block_ids[place]
            if place < num_published and (block or not self.has_windows):
                self._keep(block, self._prefixes.hash(sequence, place))
            elif block:
                self.device.release(block)
        for block in sequence.host_blocks.values():
            self.host.release(block)
        if self.fixed.num_blocks:
            self.fixed.free(sequence)
        sequence.block_ids = []
        sequence.host_blocks = {}
        sequence.num_ready = 0

    def _keep(self, block: int, block_hash: bytes) -> None:
        """Releases a full block, and marks the block under which its content is found as just used."""
        if block:
            self.device.publish(block, block_hash)
            self.device.release(block)
        self.device.refresh(block_hash)

    # Swapping

    def swap_out(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Moves the blocks that only this sequence holds to the host. Returns False, without change, if it cannot."""
        return self._swapping.swap_out(sequence, step)

    def swap_in(self, sequence: Sequence, step: StepBuilder, num_spare: int) -> bool:
        """Swaps a sequence in, with room for its next token. Returns False if too few blocks would stay free."""
        is_back = self._swapping.swap_in(sequence, step, num_spare)
        return is_back and (sequence.is_prefilling or self.grow(sequence, step))


class BlockUsage:
    """Which device blocks sequences hold, and what would be free without them. Changes nothing."""

    __slots__ = ("_device",)

    def __init__(self, device: BlockPool) -> None:
        self._device = device

    def has_any(self, sequence: Sequence) -> bool:
        return any(sequence.block_ids)

    def count_own(self, sequence: Sequence) -> int:
        """Counts the device blocks that only this sequence holds."""
        references = self._device.references
        return sum(references[block] == 1 for block in chain(sequence.block_ids, sequence.fixed_ids))

    def may_free(self, sequences: Many[Sequence], num_blocks: int) -> bool:
        """Whether at least `num_blocks` device blocks would be free without these sequences. Shared ones stay held."""
        num_free = self._device.num_free
        num_held = sum(len(sequence.block_ids) + len(sequence.fixed_ids) for sequence in sequences)
        if num_free + num_held < num_blocks:
            return False
        num_holders = Counter[int]()
        for sequence in sequences:
            for block in filter(None, chain(sequence.block_ids, sequence.fixed_ids)):
                num_holders[block] += 1
                num_free += num_holders[block] == self._device.references[block]
            if num_free >= num_blocks:
                break
        return num_free >= num_blocks
