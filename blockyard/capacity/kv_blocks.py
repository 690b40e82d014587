"""Counts the blocks of sequences, whose layers may be in several KV groups, some of which keep a window of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """The blocks that sequences have. `windows`: of each KV group the keys that a query sees; 0: all."""

    block_size: int
    windows: tuple[int, ...] = (0,)
    max_num_batched_tokens: int = 1
    """Of a step: a prefill has blocks for two pieces of it behind its windows, as the scheduler's core says."""

    def _count_kept(self, num_pending: int) -> int:
        """Counts the blocks of tokens of which a group with a window has blocks, with so many tokens behind it."""
        return -(-(max(self.windows) + num_pending) // self.block_size) + 2

    @property
    def _num_ahead(self) -> int:
        # Three steps are in flight at most, but for pipelines, whose virtual engines count.
        return self._count_kept(2 * self.max_num_batched_tokens + 3)

    def count_blocks(self, num_tokens: int) -> int:
        """Counts the device blocks that a sequence of so many tokens has when it decodes."""
        num_blocks = -(-num_tokens // self.block_size)
        num_kept = min(num_blocks, self._count_kept(1))
        return sum(num_kept if window else num_blocks for window in self.windows)

    def count_tokens(self, num_blocks: int) -> int | None:
        """Counts the tokens that one sequence can have in so many blocks; None: there is no limit."""
        num_full = self.windows.count(0)
        num_windowed = len(self.windows) - num_full
        even = num_blocks // len(self.windows)
        if not num_windowed or even < self._num_ahead:
            return even * self.block_size
        if not num_full:
            return None
        return (num_blocks - num_windowed * self._num_ahead) // num_full * self.block_size
