"""The fixed blocks of sequences: as many as the model says, from a sequence's beginning to its end.

They hold what has one size whatever a sequence's length, such as the state of recurrent layers. A fixed block has one
holder and no hash, since each step of its sequence writes to it. Each step needs what the step before it has left
there, so a sequence that is computed has all of its fixed blocks.

A child begins with a copy of its parent's. The content is complete only behind the last step that was made before the
fork. So the copy belongs to the next step that is sent, before anything is computed; until then its sources stay held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from scheduler_service.core.values import BlockPair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scheduler_service.core.blocks.block_pool import BlockPool
    from scheduler_service.core.blocks.host_tier import HostTier
    from scheduler_service.core.sequence import Sequence
    from scheduler_service.core.step import StepBuilder


class _Copy(NamedTuple):
    """What a child waits for. `last_step_id`: the last step that writes to the sources."""

    last_step_id: int
    pairs: list[BlockPair]


class FixedBlocks:
    """Allocates, copies, swaps and releases fixed blocks. `allocate` hands out a free device block.

    `num_blocks`: of each sequence; 0: the model has none, and only `has_room` may be used.
    """

    __slots__ = ("_allocate", "_copies", "_device", "_tier", "num_blocks")

    def __init__(self, num_blocks: int, device: BlockPool, tier: HostTier, allocate: Callable[[], int]) -> None:
        self.num_blocks = num_blocks
        self._device = device
        self._tier = tier
        self._allocate = allocate
        self._copies: dict[Sequence, _Copy] = {}

    def reset(self) -> None:
        self._copies.clear()

    @property
    def has_room(self) -> bool:
        """Whether another sequence's fixed blocks are free."""
        return self._device.num_free >= self.num_blocks

    def take(self, sequence: Sequence) -> None:
        """Allocates a sequence's fixed blocks. What they hold counts as nothing before its first token."""
        sequence.fixed_ids = [self._allocate() for _ in range(self.num_blocks)]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Allocates a child's fixed blocks, and has its parent's copied into them."""
        self.take(child)
        child.snapshots = parent.snapshots[-1:]
        for block in parent.fixed_ids:
            self._device.share(block)
        pairs = [BlockPair(*pair) for pair in zip(parent.fixed_ids, child.fixed_ids, strict=True)]
        self._copies[child] = _Copy(parent.last_step_id, pairs)

    def is_complete(self, sequence: Sequence) -> bool:
        """Whether a sequence's fixed blocks hold its content once all steps so far are executed."""
        return sequence not in self._copies

    def free(self, sequence: Sequence) -> None:
        copy = self._copies.pop(sequence, None)
        if copy is not None:
            self._release_sources(copy)
        for block in sequence.fixed_ids:
            self._device.release(block)
        for block in sequence.fixed_host:
            self._tier.pool.release(block)
        sequence.fixed_ids, sequence.fixed_host = [], []

    def swap_out(self, sequence: Sequence, step: StepBuilder) -> None:
        """Moves a sequence's fixed blocks to the host, which has room for them."""
        sequence.fixed_host = [self._tier.keep(block, None, step) for block in sequence.fixed_ids]
        for block in sequence.fixed_ids:
            self._device.release(block)
        sequence.fixed_ids = []

    def swap_in(self, sequence: Sequence, step: StepBuilder) -> None:
        """Brings a sequence's fixed blocks back into free device blocks."""
        self.take(sequence)
        step.swap_in += [BlockPair(*pair) for pair in zip(sequence.fixed_host, sequence.fixed_ids, strict=True)]
        self._tier.hand_over(sequence.fixed_host)
        sequence.fixed_host = []
        step.replaced_fixed[sequence.sequence_id] = sequence

    def find_due(self, step: StepBuilder) -> list[Sequence]:
        """Finds the children that get their copies in a complete step. A step that does nothing is not sent."""
        if step.is_idle:
            return []
        return [child for child, copy in self._copies.items() if copy.last_step_id < step.step_id]

    def settle(self, step: StepBuilder) -> None:
        """Adds the copies that are due to a complete step."""
        for child in self.find_due(step):
            copy = self._copies.pop(child)
            step.copies += copy.pairs
            self._release_sources(copy)

    def _release_sources(self, copy: _Copy) -> None:
        for pair in copy.pairs:
            self._device.release(pair.source)

    @property
    def held_sources(self) -> Iterator[int]:
        """The blocks that are held until they are copied, once for each copy."""
        return (pair.source for copy in self._copies.values() for pair in copy.pairs)
