"""Which device blocks sequences hold, and what would be free without them. Changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from scheduler_service.core.blocks.block_pool import BlockPool
    from scheduler_service.core.sequence import Sequence


class BlockUsage:
    __slots__ = ("_device",)

    def __init__(self, device: BlockPool) -> None:
        self._device = device

    def has_any(self, sequence: Sequence) -> bool:
        return any(sequence.block_ids)

    def count_own(self, sequence: Sequence) -> int:
        """Counts the device blocks that only this sequence holds."""
        references = self._device.references
        return sum(references[block] == 1 for block in sequence.block_ids)

    def may_free(self, sequences: Many[Sequence], num_blocks: int) -> bool:
        """Whether at least `num_blocks` device blocks would be free without these sequences. Shared ones stay held."""
        num_free = self._device.num_free
        if num_free + sum(len(sequence.block_ids) for sequence in sequences) < num_blocks:
            return False
        num_holders = Counter[int]()
        for sequence in sequences:
            for block in filter(None, sequence.block_ids):
                num_holders[block] += 1
                num_free += num_holders[block] == self._device.references[block]
            if num_free >= num_blocks:
                break
        return num_free >= num_blocks
