"""Releases the blocks that have fallen behind a sliding window, and gives a prefill others ahead in their place.

A block is released with the answer after which no query, in flight or later, can see it. It stays findable by its
content until it is evicted.

A prefill is admitted with all blocks of the groups without a window. In the other groups it gets as many blocks as it
needs to go on without waiting: for each block that it releases it gets one ahead. So these blocks must not be shared,
and are not findable, until the prefill has its last ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from scheduler_service.core.blocks.block_pool import BlockPool
    from scheduler_service.core.blocks.prefix_lookup import PrefixLookup
    from scheduler_service.core.config import KvBlockGroups
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.step import StepBuilder


class WindowBlocks:
    """The blocks of groups that have a window. `allocate` hands out a free device block."""

    __slots__ = ("_allocate", "_device", "_host", "_prefixes", "groups", "num_given_back_total")

    def __init__(
        self,
        groups: KvBlockGroups,
        device: BlockPool,
        host: BlockPool,
        prefixes: PrefixLookup,
        allocate: Callable[[], int],
    ) -> None:
        self.groups = groups
        self.num_given_back_total = 0
        self._device = device
        self._host = host
        self._prefixes = prefixes
        self._allocate = allocate

    def _count_full(self, sequence: Sequence) -> int:
        """Counts the blocks of tokens that were full when `publish` last ran."""
        return sequence.publish_at // self.groups.block_size - 1

    def find_missing(self, sequence: Sequence) -> list[int]:
        """Finds the places without a device block that need one for the sequence to run."""
        groups, table = self.groups, sequence.block_ids
        if not groups.widest:
            return [place for place, block in enumerate(table) if not block]
        num_full, num_groups = self._count_full(sequence), groups.num_groups
        end = sequence.num_ready if sequence.is_prefilling else len(table) // num_groups
        missing: list[int] = []
        for place, block in enumerate(table):
            window, index = groups.windows[place % num_groups], place // num_groups
            if not block and (not window or groups.first_kept(window, num_full) <= index < end):
                missing.append(place)
        return missing

    def reserves(self, sequence: Sequence, place: int) -> bool:
        """Whether the block of this place must not be shared."""
        return sequence.is_prefilling and self.groups.windows[place % self.groups.num_groups] > 0

    def publish(self, sequence: Sequence) -> None:
        """Makes full blocks findable, as far as they may be shared, and releases those behind windows."""
        groups = self.groups
        while sequence.publish_at <= sequence.num_computed:
            num_full = sequence.publish_at // groups.block_size
            for group, window in enumerate(groups.windows):
                if not (window and sequence.is_prefilling):
                    self._publish(sequence, (num_full - 1) * groups.num_groups + group)
                for index in range(groups.first_kept(window, num_full - 1), groups.first_kept(window, num_full)):
                    self._give_back(sequence, index * groups.num_groups + group)
            sequence.publish_at += groups.block_size
        if sequence.num_ready and not sequence.is_prefilling:
            for place in self._find_kept(sequence):
                self._publish(sequence, place)
            sequence.num_ready = 0

    def _publish(self, sequence: Sequence, place: int) -> None:
        block = sequence.block_ids[place]
        if block and self._prefixes.is_enabled:
            self._device.publish(block, self._prefixes.hash(sequence, place))

    def _find_kept(self, sequence: Sequence) -> Iterator[int]:
        """Finds the full places that groups with windows keep."""
        num_groups, num_full = self.groups.num_groups, self._count_full(sequence)
        for group, window in enumerate(self.groups.windows):
            if window:
                for index in range(self.groups.first_kept(window, num_full), num_full):
                    yield index * num_groups + group

    def _give_back(self, sequence: Sequence, place: int) -> None:
        block = sequence.block_ids[place]
        if block:
            self._publish(sequence, place)
            self._device.release(block)
            sequence.block_ids[place] = 0
            self.num_given_back_total += 1
        host_block = sequence.host_blocks.pop(place, None)
        if host_block is not None:
            self._host.release(host_block)

    def catch_up(self, sequence: Sequence) -> None:
        """Releases what fell behind windows while the sequence was swapped out, before it is swapped in."""
        self.publish(sequence)
        if sequence.is_prefilling:
            sequence.num_ready = self._count_ready(sequence)

    def _count_ready(self, sequence: Sequence) -> int:
        num_blocks = len(sequence.block_ids) // self.groups.num_groups
        return self.groups.count_ready(sequence.num_found, self._count_full(sequence), num_blocks)

    def count_writable(self, sequence: Sequence) -> int:
        """Counts the first tokens of a prefill that have blocks in all groups."""
        return sequence.num_ready * self.groups.block_size

    def reserve(self, prefills: Iterable[Sequence], step: StepBuilder) -> None:
        """Gives prefills the blocks ahead that replace the ones they released, before others can take them."""
        for sequence in prefills:
            self._reserve(sequence, step)

    def _reserve(self, sequence: Sequence, step: StepBuilder) -> None:
        groups = self.groups
        num_groups = groups.num_groups
        num_ready = self._count_ready(sequence)
        if num_ready <= sequence.num_ready:
            return
        for index in range(sequence.num_ready, num_ready):
            for group, window in enumerate(groups.windows):
                if window:
                    sequence.block_ids[index * num_groups + group] = self._allocate()
        sequence.num_ready = num_ready
        step.replaced[sequence.sequence_id] = sequence
