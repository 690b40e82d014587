"""The host pool: blocks of preempted sequences, and content that was evicted from the device.

Knows no sequences. A worker swaps out before it swaps in. So a step must not write a host block that it reads, nor read
one that it writes, nor write one twice. Whatever a step touches is therefore held until the step is complete, and what
it writes is findable only afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core.blocks.block_pool import BlockPool
from scheduler_service.core.values import BlockPair

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.step import StepBuilder


class HostTier:
    """Keeps the content of device blocks, and finds it again.

    `caches`: it keeps content that nobody holds. `held`: the blocks that the step under construction reads or writes,
    of one prefix the deeper behind the head. `spills`: what it saves of evicted device blocks, by the content's hash.
    """

    __slots__ = ("_taken", "_written", "caches", "held", "pool", "spills")

    def __init__(self, num_blocks: int, *, caches: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.caches = caches
        self.held: list[int] = []
        self._written: set[int] = set()  # by this step
        self.spills: dict[bytes, BlockPair] = {}
        self._taken: set[int] = set()  # blocks written at least once: the system has given them memory

    def reset(self) -> None:
        self.pool.reset()
        self.held.clear()
        self._written.clear()
        self.spills.clear()
        # The worker may be a new process.
        self._taken.clear()

    def find(self, block_hash: bytes) -> int | None:
        """Finds a block with this content that the step under construction may read."""
        block = self.pool.find(block_hash)
        return None if block in self._written else block

    def read(self, block: int) -> None:
        """Holds a block that the step found and reads."""
        self.pool.share(block)
        self.held.append(block)

    def hand_over(self, blocks: Iterable[int]) -> None:
        """Takes over the blocks that a sequence held, until the step has read them. Deeper ones come last."""
        self.held.extend(blocks)

    def make_room(self, num_blocks: int) -> bool:
        """Makes room for a preempted sequence by dropping spills. Returns whether there is enough."""
        while self.pool.num_free < num_blocks and self.spills:
            _, pair = self.spills.popitem()
            self.pool.release(pair.destination)
        return self.pool.num_free >= num_blocks

    def keep(self, device_block: int, block_hash: bytes | None, step: StepBuilder) -> int:
        """Returns the host block for a preempted sequence's content, and copies the content unless the host has it."""
        if block_hash is not None:
            known = self.pool.find(block_hash)
            if known is not None:
                self.pool.share(known)
                return known
        block = self.pool.allocate()
        self.read(block)
        self._written.add(block)
        if block_hash is not None and self.caches:
            self.pool.publish(block, block_hash)
        step.swap_out.append(BlockPair(device_block, block))
        return block

    def spill(self, device_block: int, block_hash: bytes) -> None:
        """Saves the content of an evicted device block, in place of the least recently used content."""
        if self.pool.find(block_hash) is not None:
            self.pool.refresh(block_hash)
        elif self.pool.num_free:
            self.spills[block_hash] = BlockPair(device_block, self.pool.allocate())

    def settle(self, step: StepBuilder) -> None:
        """Completes a step: makes its spills findable and releases what it touched."""
        for block_hash, pair in self.spills.items():
            step.swap_out.append(pair)
            self.pool.publish(pair.destination, block_hash)
            self.pool.release(pair.destination)
        num_taken = len(self._taken)
        self._taken.update(pair.destination for pair in step.swap_out)
        step.takes_memory = len(self._taken) > num_taken
        for block in reversed(self.held):
            self.pool.release(block)
        self.held.clear()
        self._written.clear()
        self.spills.clear()
