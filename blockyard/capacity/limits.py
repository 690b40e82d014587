"""Limits on blocks and steps, shared by the planner and the worker so that both refuse with the same words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from blockyard.contract.workers import count_decoded_ahead
from blockyard.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.workers import ProfileRequest


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Counts the blocks of a sequence. `windows`: for each KV group how many keys a query sees; 0: all."""

    block_size: int
    windows: tuple[int, ...] = (0,)
    max_num_batched_tokens: int = 1
    """A prefill holds blocks for two chunks of this size beyond its windows, as in the scheduler's core."""
    max_draft_tokens: int = 0
    """Most tokens that a sequence drafts in a step; then its tables have blocks for those in flight."""
    num_state_blocks: int = 0
    """Fixed blocks of a sequence, whatever its length. With these there may be no KV group."""

    def _count_kept(self, num_pending: int) -> int:
        """Returns how many blocks a sliding-window group keeps for `num_pending` tokens."""
        return -(-(max(self.windows, default=0) + num_pending) // self.block_size) + 2

    @property
    def _num_ahead(self) -> int:
        # At most three steps are in flight; with pipelines the number of virtual engines bounds them.
        return self._count_kept(2 * self.max_num_batched_tokens + count_decoded_ahead(3, self.max_draft_tokens))

    def count_blocks(self, num_tokens: int) -> int:
        """Counts the device blocks of a sequence of `num_tokens` tokens that decodes, over all KV groups."""
        num_blocks = -(-num_tokens // self.block_size)
        num_kept = min(num_blocks, self._count_kept(1))
        return sum(num_kept if window else num_blocks for window in self.windows) + self.num_state_blocks

    def count_tokens(self, num_blocks: int) -> int | None:
        """Counts the tokens of the longest sequence that fits into `num_blocks`; None: there is no limit."""
        num_blocks -= self.num_state_blocks
        if num_blocks < 0:
            return 0
        if not self.windows:
            return None
        num_full = self.windows.count(0)
        num_windowed = len(self.windows) - num_full
        even = num_blocks // len(self.windows)
        if not num_windowed or even < self._num_ahead:
            return even * self.block_size
        if not num_full:
            return None
        return (num_blocks - num_windowed * self._num_ahead) // num_full * self.block_size


BLOCK_SIZES = (8, 16, 32, 64, 128, 256)

DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}

# The largest limits of a step. Larger numbers are mistakes that only the memory in use would reveal.
MAX_TOKENS, MAX_SEQS = 2**20, 2**16

# More blocks than twice what all sequences hold at full length only cost bookkeeping.
USEFUL_SHARE = 2


class DoesNotFit(Exception):
    """The sequence length is above the model's maximum, or the blocks cannot hold it."""


def wrong_profile_request(request: ProfileRequest) -> Iterable[Violation]:
    if request.block_size:
        yield from wrong_block_size(request.block_size)
    if not 0 < request.device_memory_utilization <= 1:
        yield Violation("device_memory_utilization", "must be above 0 and at most 1")
    yield from wrong_step_size(request.max_num_batched_tokens, request.max_num_seqs)


def wrong_block_size(block_size: int) -> Iterable[Violation]:
    if block_size not in BLOCK_SIZES:
        yield Violation("block_size", f"must be one of {', '.join(map(str, BLOCK_SIZES))}, not {block_size}")


def wrong_step_size(max_num_batched_tokens: int, max_num_seqs: int) -> Iterable[Violation]:
    limits = {"max_num_batched_tokens": (max_num_batched_tokens, MAX_TOKENS), "max_num_seqs": (max_num_seqs, MAX_SEQS)}
    for name, (given, most) in limits.items():
        if not 1 <= given <= most:
            yield Violation(name, f"must be from 1 to {most}")


def max_useful_blocks(
    max_num_seqs: int, max_model_len: int, block_size: int, num_kv_groups: int = 1, num_state_blocks: int = 0
) -> int:
    """Returns the largest useful number of device blocks, the scratch block included."""
    num_blocks = -(-max_model_len // block_size) * num_kv_groups + num_state_blocks
    return USEFUL_SHARE * max_num_seqs * num_blocks + 1


def choose_max_model_len(
    asked: int | Literal["auto"],
    model_max_model_len: int,
    num_device_blocks: int,
    block_size: int,
    kv_blocks: KvBlocks | None = None,
) -> int:
    """Chooses max_model_len; auto: the smaller of the model's maximum and what the blocks hold.

    Args:
        asked: the maximum length in tokens, or auto.
        model_max_model_len: the model's own maximum, in tokens.
        num_device_blocks: the scratch block included.
        block_size: tokens of a block.
        kv_blocks: counts the blocks of a sequence; None: one block for each `block_size` tokens.

    Raises:
        DoesNotFit: `asked` is above a limit, or the blocks hold no token.
    """
    capacity = (kv_blocks or KvBlocks(block_size)).count_tokens(num_device_blocks - 1)
    if capacity is None:
        capacity = model_max_model_len
    if capacity <= 0:
        raise DoesNotFit(
            f"{num_device_blocks} device blocks leave no room for any token: the memory is too small"
            " (see --device-memory-utilization)"
        )
    if asked == "auto":
        return min(model_max_model_len, capacity)
    if asked > model_max_model_len:
        raise DoesNotFit(f"--max-model-len {asked} is above the {model_max_model_len} tokens of the model")
    if asked > capacity:
        raise DoesNotFit(
            f"--max-model-len {asked} is above the {capacity} tokens that {num_device_blocks} device blocks hold"
            " (block 0 is scratch)"
        )
    return asked
