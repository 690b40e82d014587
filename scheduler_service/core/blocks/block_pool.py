"""One pool of numbered blocks: references, free lists, and an index by content. Knows no sequences.

A block is *unused* (free, without useful content), *evictable* (free, but found by the hash of its content) or *held*
(referenced). Every operation is O(1).
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Blocks `first_block` to `num_blocks - 1`; lower ones are never handed out."""

    __slots__ = (
        "_block_of_hash",
        "_evictable",
        "_first_block",
        "_hash_of_block",
        "_num_blocks",
        "_unused",
        "references",
    )

    def __init__(self, num_blocks: int, first_block: int = 0) -> None:
        self._num_blocks = num_blocks
        self._first_block = first_block
        self.references: list[int] = []
        self._unused: list[int] = []
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        self.reset()

    @property
    def num_usable(self) -> int:
        """Blocks that can be handed out at all, free or held."""
        return self._num_blocks - self._first_block

    @property
    def num_free(self) -> int:
        return len(self._unused) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that are found by hash, held or not."""
        return len(self._block_of_hash)

    @property
    def next_forgotten(self) -> bytes | None:
        """The hash of the content that the next `allocate` evicts; None if it evicts nothing."""
        if self._unused or not self._evictable:
            return None
        return self._hash_of_block[next(iter(self._evictable))]

    def reset(self) -> None:
        self.references = [0] * self._num_blocks
        self._unused = list(range(self._num_blocks - 1, self._first_block - 1, -1))
        self._evictable.clear()
        self._block_of_hash.clear()
        self._hash_of_block.clear()

    def forget_evictable(self) -> int:
        """Forgets the content of evictable blocks. Returns how many there were."""
        num_forgotten = len(self._evictable)
        while self._evictable:
            self._unused.append(self._evict())
        return num_forgotten

    def allocate(self) -> int:
        """Returns a block for one holder. Evicts the least recently used one if none is unused.

        Raises IndexError when `num_free` is 0.
        """
        block = self._unused.pop() if self._unused else self._evict()
        self.references[block] = 1
        return block

    def _evict(self) -> int:
        if not self._evictable:
            raise IndexError("no free block")
        block, _ = self._evictable.popitem(last=False)
        del self._block_of_hash[self._hash_of_block.pop(block)]
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a held or evictable block."""
        if not self.references[block]:
            del self._evictable[block]
        self.references[block] += 1

    def release(self, block: int) -> None:
        """Removes a holder. Release a sequence's blocks from last to first, so that deeper ones are evicted first."""
        self.references[block] -= 1
        if self.references[block]:
            return
        if block in self._hash_of_block:
            self._evictable[block] = None
        else:
            self._unused.append(block)

    def publish(self, block: int, block_hash: bytes) -> None:
        """Makes a held block findable. Does nothing if another block has this content, or if this one is findable."""
        if block_hash not in self._block_of_hash and block not in self._hash_of_block:
            self._block_of_hash[block_hash] = block
            self._hash_of_block[block] = block_hash

    def forget(self, block_hash: bytes) -> None:
        """Forgets content, if a block that nobody holds has it."""
        block = self._block_of_hash.get(block_hash)
        if block is not None and block in self._evictable:
            del self._evictable[block], self._block_of_hash[block_hash], self._hash_of_block[block]
            self._unused.append(block)

    def find(self, block_hash: bytes) -> int | None:
        return self._block_of_hash.get(block_hash)

    def is_published(self, block: int) -> bool:
        """Whether this block itself is found by its content."""
        return block in self._hash_of_block

    def refresh(self, block_hash: bytes) -> None:
        """Marks the block with this content as just used, if it is evictable."""
        block = self._block_of_hash.get(block_hash)
        if block is not None and block in self._evictable:
            self._evictable.move_to_end(block)

    def check(self, holders: dict[int, int]) -> None:
        """Raises AssertionError unless all blocks are consistent and held as `holders` (block: count) says."""
        unused, evictable = set(self._unused), set(self._evictable)
        held = {block for block, count in enumerate(self.references) if count}
        everything = set(range(self._first_block, self._num_blocks))
        assert len(unused) == len(self._unused), "a block stands twice in the free list"
        assert unused | evictable | held == everything, f"leaked: {sorted(everything - unused - evictable - held)}"
        assert not (unused & evictable or unused & held or evictable & held), "a block is in two states"
        actual = {block: self.references[block] for block in held}
        assert actual == holders, f"references {actual}, held {holders}"
        hashes = {block: block_hash for block_hash, block in self._block_of_hash.items()}
        assert hashes == self._hash_of_block, "the two maps of hashes differ"
        assert evictable <= hashes.keys() and not unused & hashes.keys(), "hash and state of a block disagree"
