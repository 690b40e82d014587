"""Counts the KV blocks of sequences. Layers may form several KV groups; some keep only a sliding window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Counts the blocks of a sequence. `windows`: for each KV group how many keys a query sees; 0: all."""

    block_size: int
    windows: tuple[int, ...] = (0,)
    max_num_batched_tokens: int = 1
    """A prefill holds blocks for two chunks of this size beyond its windows, as in the scheduler's core."""

    def _count_kept(self, num_pending: int) -> int:
        """Returns how many blocks a sliding-window group keeps for `num_pending` tokens."""
        return -(-(max(self.windows) + num_pending) // self.block_size) + 2

    @property
    def _num_ahead(self) -> int:
        # At most three steps are in flight; with pipelines the number of virtual engines bounds them.
        return self._count_kept(2 * self.max_num_batched_tokens + 3)

    def count_blocks(self, num_tokens: int) -> int:
        """Counts the device blocks of a sequence of `num_tokens` tokens that decodes, over all KV groups."""
        num_blocks = -(-num_tokens // self.block_size)
        num_kept = min(num_blocks, self._count_kept(1))
        return sum(num_kept if window else num_blocks for window in self.windows)

    def count_tokens(self, num_blocks: int) -> int | None:
        """Counts the tokens of the longest sequence that fits into `num_blocks`; None: there is no limit."""
        num_full = self.windows.count(0)
        num_windowed = len(self.windows) - num_full
        even = num_blocks // len(self.windows)
        if not num_windowed or even < self._num_ahead:
            return even * self.block_size
        if not num_full:
            return None
        return (num_blocks - num_windowed * self._num_ahead) // num_full * self.block_size
