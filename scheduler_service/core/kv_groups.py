"""KV groups: layers that keep the same tokens, and have a block of each `block_size` tokens together.

A block table has a place for each group and each block of tokens, those of one block of tokens side by side: place p is
of group `p % num_groups`. A group with a window keeps no more than its queries will see.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvBlockGroups:
    """The groups of a model. `windows`: for each the keys that a query sees, its own among them; 0: all.

    `num_ahead`: a prefill has blocks for so many blocks of tokens, from the first one on that a window still sees; no
    sequence that decodes needs more.
    """

    block_size: int
    windows: tuple[int, ...] = (0,)
    num_ahead: int = 0

    @property
    def num_groups(self) -> int:
        """Groups, and so the blocks that another `block_size` tokens take."""
        return len(self.windows)

    @property
    def widest(self) -> int:
        """The widest window; 0: no group has one."""
        return max(self.windows)

    def first_kept(self, window: int, num_full: int) -> int:
        """Returns the first block of tokens that a window still sees when so many are full and computed.

        The next query is at `num_full * block_size` or behind it; so is each one that is in flight.
        """
        return max(0, (num_full * self.block_size - window + 1) // self.block_size) if window else 0

    def count_ready(self, num_found: int, num_full: int, num_blocks: int) -> int:
        """Returns for how many of `num_blocks` blocks of tokens a prefill has its blocks, in all groups.

        `num_found`: those that were cached when it began. They may be others' too, so that giving them back brings
        nothing: for what a prefill gives back of the rest it gets as many ahead, and so lacks none on its way.
        """
        if not self.widest:
            return num_blocks
        return min(num_blocks, max(num_found, self.first_kept(self.widest, num_full)) + self.num_ahead)

    def count_blocks(self, num_tokens: int) -> int:
        """Counts the blocks that a sequence of so many tokens needs at most, if nothing of it is cached."""
        num_blocks = -(-num_tokens // self.block_size)
        num_kept = min(num_blocks, self.num_ahead)
        return sum(num_kept if window else num_blocks for window in self.windows)

    def count_tokens(self, num_blocks: int) -> int | None:
        """Counts the tokens of the longest sequence that so many blocks hold; None: there is no longest."""
        num_full = self.windows.count(0)
        num_windowed = self.num_groups - num_full
        even = num_blocks // self.num_groups
        if not num_windowed or even < self.num_ahead:
            return even * self.block_size
        if not num_full:
            return None
        return (num_blocks - num_windowed * self.num_ahead) // num_full * self.block_size
