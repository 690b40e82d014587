"""Finds cached blocks by the hash of their content, and hashes the blocks of sequences. Holds and frees nothing."""

from __future__ import annotations

from array import array
from hashlib import blake2b, sha256
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence as Many

    from scheduler_service.core.blocks.block_pool import BlockPool
    from scheduler_service.core.blocks.host_tier import HostTier
    from scheduler_service.core.config import KvBlockGroups
    from scheduler_service.core.cost import CostModel
    from scheduler_service.core.sequence import Sequence


def hash_block(parent: bytes, token_ids: Many[int], extra_keys: bytes = b"") -> bytes:
    """Hashes a full block with all that precedes it: hashes are equal only if all tokens are.

    `parent`: the hash of the block before, or `root_hash` for the first. `extra_keys`: what else the KV depends on.
    """
    return sha256(parent + extra_keys + array("I", token_ids).tobytes()).digest()


def root_hash(cache_salt: bytes) -> bytes:
    """Returns the parent of a first block; empty without a salt.

    It is another hash function than that of blocks, so that no salt can be chosen whose blocks look like others.
    """
    return blake2b(cache_salt, digest_size=32, person=b"cache salt").digest() if cache_salt else b""


def name_of_group(block_hash: bytes, group: int) -> bytes:
    """Returns the hash for the block of another KV group than the first, of the same tokens."""
    return block_hash + bytes((group,))


def name_of_state(block_hash: bytes, place: int) -> bytes:
    """Returns the hash for a fixed block with the state behind a block of tokens."""
    return block_hash + b"state" + place.to_bytes(4)


Found = tuple[int, int | None]
"""Where content is: a device block, or 0 and a host block."""


class Prefix(NamedTuple):
    """The cached part of a sequence: its device blocks, and the host blocks by their place in the table.

    A device block is 0 where only the host has the content, and where no window sees it any more. If the model's layers
    have a state, `states` are the blocks with that at `position`; up to `num_reached` all else is cached.
    """

    block_ids: list[int]
    host_blocks: dict[int, int]
    states: tuple[Found, ...] = ()
    position: int = 0
    num_reached: int = 0

    def find_shared(self, num_places: int, num_groups: int) -> list[int]:
        """Finds the places of the last blocks that may be shared and need a copy, if the whole sequence is cached.

        The last token is always computed again, and writes into them.
        """
        if len(self.block_ids) < num_places:
            return []
        return [place for place in range(num_places - num_groups, num_places) if place not in self.host_blocks]


class PrefixLookup:
    """Looks sequences up in both pools. `is_enabled`: there is a prefix cache."""

    __slots__ = (
        "_block_size",
        "_costs",
        "_device",
        "_groups",
        "_num_groups",
        "_num_state_blocks",
        "_snapshot_distance",
        "_tier",
        "is_enabled",
        "weights_version",
    )

    def __init__(
        self,
        groups: KvBlockGroups,
        device: BlockPool,
        tier: HostTier,
        costs: CostModel,
        *,
        is_enabled: bool,
        snapshot_distance: int = 0,
    ) -> None:
        self._groups = groups
        # The hashes of tokens are needed without KV groups too.
        self._block_size, self._num_groups = groups.block_size, max(groups.num_groups, 1)
        self._num_state_blocks = groups.num_state_blocks
        self._snapshot_distance = snapshot_distance
        self._device = device
        self._tier = tier
        self._costs = costs
        self.is_enabled = is_enabled
        # The version of the weights that compute this KV: blocks of other weights are not found.
        self.weights_version = ""

    @property
    def uses_host(self) -> bool:
        """Whether evicted content goes to the host and comes back, since that is cheaper than computing it again."""
        return self._tier.caches and self._costs.prefers_host_block()

    def find(self, sequence: Sequence) -> Prefix:
        """Finds the cached blocks with which a sequence begins."""
        if not self.is_enabled or sequence.group.spec.computes_prompt:
            return Prefix([], {})
        reads_host = self.uses_host
        if self._num_state_blocks:
            return self._find_with_states(sequence, reads_host=reads_host)
        return self._find_blocks(sequence, len(sequence.token_ids) // self._block_size, reads_host=reads_host)

    def _find_with_states(self, sequence: Sequence, *, reads_host: bool) -> Prefix:
        """Finds the cached blocks up to the last snapshot before which all are cached, and before the last token."""
        size, distance = self._block_size, self._snapshot_distance
        num_blocks, num_reached = (len(sequence.token_ids) - 1) // size, -1
        while num_blocks:
            prefix = self._find_blocks(sequence, num_blocks, reads_host=reads_host)
            reached = self._groups.count_full(prefix.block_ids) * size if self._groups.windows else num_blocks * size
            num_reached = max(num_reached, reached)
            for position in range(reached // distance * distance, 0, -distance):
                if states := self.find_states(sequence, position, reads_host=reads_host):
                    break
            else:
                break
            if position == reached:
                return Prefix(prefix.block_ids, prefix.host_blocks, states, position, num_reached)
            num_blocks = position // size
        return Prefix([], {}, num_reached=max(num_reached, 0))

    def find_states(self, sequence: Sequence, position: int, *, reads_host: bool) -> tuple[Found, ...]:
        """Finds the blocks with a sequence's state at a position; empty unless all are cached."""
        state_hash = self.hash_at(sequence, position)
        states: list[Found] = []
        for place in range(self._num_state_blocks):
            found = self._look_up(name_of_state(state_hash, place), reads_host=reads_host)
            if found is None:
                return ()
            states.append(found)
        return tuple(states)

    def _find_blocks(self, sequence: Sequence, num_blocks: int, *, reads_host: bool) -> Prefix:
        """Finds the cached blocks of the first `num_blocks` blocks of tokens."""
        groups = self._groups
        if groups.num_groups == 1 and not groups.widest:
            return self._find_chain(sequence, num_blocks, 0, reads_host=reads_host)
        chains = [
            Prefix([], {}) if window else self._find_chain(sequence, num_blocks, group, reads_host=reads_host)
            for group, window in enumerate(groups.windows)
        ]
        depth = min(
            (len(chain.block_ids) for chain, window in zip(chains, groups.windows, strict=True) if not window),
            default=num_blocks,
        )
        return self._add_windows(sequence, chains, depth, reads_host=reads_host)

    def _look_up(self, block_hash: bytes, *, reads_host: bool) -> Found | None:
        """Finds content by its hash; None: neither pool has it."""
        block = self._device.find(block_hash)
        if block is not None:
            return block, None
        host_block = self._tier.find(block_hash) if reads_host else None
        return None if host_block is None else (0, host_block)

    def _find_chain(self, sequence: Sequence, num_blocks: int, group: int, *, reads_host: bool) -> Prefix:
        """Finds the cached blocks of one group without a window."""
        prefix = Prefix([], {})
        num_groups = self._groups.num_groups
        for place in range(group, num_blocks * num_groups, num_groups):
            found = self._look_up(self.hash(sequence, place), reads_host=reads_host)
            if found is None:
                break
            block, host_block = found
            prefix.block_ids.append(block)
            if host_block is not None:
                prefix.host_blocks[place] = host_block
        return prefix

    def _add_windows(self, sequence: Sequence, chains: list[Prefix], depth: int, *, reads_host: bool) -> Prefix:
        """Joins the groups to the deepest common prefix: a group with a window needs only what it sees from there."""
        groups = self._groups
        num_groups = groups.num_groups
        found: dict[int, Found] = {}
        group = 0
        while group < num_groups and depth:
            first = groups.first_kept(groups.windows[group], self._count_full(sequence, depth))
            for index in range(depth - 1, first - 1, -1) if groups.windows[group] else ():
                place = index * num_groups + group
                content = found.get(place) or self._look_up(self.hash(sequence, place), reads_host=reads_host)
                if content is None:
                    # Blocks before this one may still match, so all groups are looked at again from there.
                    depth, group = index, -1
                    break
                found[place] = content
            group += 1
        prefix = Prefix([0] * (depth * num_groups), {})
        for group, window in enumerate(groups.windows):
            first = groups.first_kept(window, self._count_full(sequence, depth))
            for index in range(first, depth):
                place = index * num_groups + group
                chain = chains[group]
                block, host_block = found[place] if window else (chain.block_ids[index], chain.host_blocks.get(place))
                prefix.block_ids[place] = block
                if host_block is not None:
                    prefix.host_blocks[place] = host_block
        return prefix

    def _count_full(self, sequence: Sequence, depth: int) -> int:
        """Counts the full blocks before the first token to compute: with all cached, the last token still is."""
        block_size = self._groups.block_size
        return min(depth * block_size, len(sequence.token_ids) - 1) // block_size

    def hash(self, sequence: Sequence, place: int) -> bytes:
        """Hashes the content of a place, a full block of known tokens, once."""
        hashes, spec = sequence.block_hashes, sequence.group.spec
        num_groups, block_size = self._num_groups, self._block_size
        # The content and not the name: another adapter may be loaded under the same name.
        extra_keys = self.weights_version.encode() + (spec.lora.digest if spec.lora else b"")
        while len(hashes) <= place:
            start = len(hashes) // num_groups * block_size
            parent = hashes[-num_groups] if hashes else root_hash(spec.cache_salt)
            content = hash_block(parent, sequence.token_ids[start : start + block_size], extra_keys)
            hashes.append(content)
            if num_groups > 1:
                hashes.extend(name_of_group(content, group) for group in range(1, num_groups))
        return hashes[place]

    def hash_at(self, sequence: Sequence, position: int) -> bytes:
        """Hashes the tokens before a position, a multiple of the block size."""
        return self.hash(sequence, (position // self._block_size - 1) * self._num_groups)

    def count_published(self, sequence: Sequence) -> int:
        """Counts the first places of a sequence whose blocks were made findable when they became full."""
        if not self.is_enabled or not sequence.block_ids:
            return 0
        return (sequence.publish_at // self._block_size - 1) * self._num_groups
