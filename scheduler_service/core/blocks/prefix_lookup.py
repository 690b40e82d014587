"""Finds cached blocks by the hash of their content, and hashes the blocks of sequences. Holds and frees nothing."""

from __future__ import annotations

from array import array
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from scheduler_service.core.blocks.block_pool import BlockPool
    from scheduler_service.core.blocks.host_tier import HostTier
    from scheduler_service.core.cost import CostModel
    from scheduler_service.core.sequence import Sequence


def hash_block(parent: bytes, token_ids: Many[int], extra_keys: bytes = b"") -> bytes:
    """Hashes a full block's content with all that precedes it: equal only if all tokens are.

    `parent` is the hash of the block before, empty for the first; `extra_keys` whatever else its KV depends on.
    """
    return sha256(parent + extra_keys + array("I", token_ids).tobytes()).digest()


class Prefix(NamedTuple):
    """The cached part of a sequence: device blocks, 0 where only the host has the content (place: host block)."""

    block_ids: list[int]
    host_blocks: dict[int, int]

    def must_copy(self, num_blocks: int) -> bool:
        """Whether all is found and the last block, of which a token is computed again, may be another's."""
        return len(self.block_ids) == num_blocks and num_blocks - 1 not in self.host_blocks


class PrefixLookup:
    """Looks sequences up in both pools. `is_enabled`: there is a prefix cache."""

    __slots__ = ("_block_size", "_costs", "_device", "_tier", "is_enabled", "weights_version")

    def __init__(
        self, block_size: int, device: BlockPool, tier: HostTier, costs: CostModel, *, is_enabled: bool
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._tier = tier
        self._costs = costs
        self.is_enabled = is_enabled
        # Of the weights that all KV here comes from: what others have left is not found.
        self.weights_version = ""

    @property
    def uses_host(self) -> bool:
        """Whether content goes to the host when it is evicted, and comes back: it is cheaper than to compute it."""
        return self._tier.caches and self._costs.prefers_host_block()

    def find(self, sequence: Sequence) -> Prefix:
        """Finds the cached blocks with which a sequence begins."""
        prefix = Prefix([], {})
        if not self.is_enabled or sequence.group.spec.computes_prompt:
            return prefix
        reads_host = self.uses_host
        for place in range(len(sequence.token_ids) // self._block_size):
            block_hash = self.hash(sequence, place)
            block = self._device.find(block_hash)
            if block is None:
                host_block = self._tier.find(block_hash) if reads_host else None
                if host_block is None:
                    break
                prefix.host_blocks[place] = host_block
            prefix.block_ids.append(block or 0)
        return prefix

    def hash(self, sequence: Sequence, place: int) -> bytes:
        """Hashes the content of a full block of known tokens, once."""
        hashes, lora = sequence.block_hashes, sequence.group.spec.lora
        # The content and not the name: under one name there may be another adapter soon.
        extra_keys = self.weights_version.encode() + (lora.digest if lora else b"")
        while len(hashes) <= place:
            start = len(hashes) * self._block_size
            parent = hashes[-1] if hashes else b""
            hashes.append(hash_block(parent, sequence.token_ids[start : start + self._block_size], extra_keys))
        return hashes[place]

    def count_published(self, sequence: Sequence) -> int:
        """Counts a sequence's first blocks that are findable, or were when they were full."""
        return sequence.publish_at // self._block_size - 1 if self.is_enabled and sequence.block_ids else 0
