"""What may be asked of a worker's blocks and steps, and what they are worth: one text for whoever plans and refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from blockyard.capacity.kv_blocks import KvBlocks
from blockyard.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blockyard.contract.workers import ProfileRequest

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
DEFAULT_BLOCK_SIZE = {"cpu": 32, "cuda": 16}
# The largest step. A larger number is a mistake that would be noticed only by the memory that it takes.
MAX_TOKENS, MAX_SEQS = 2**20, 2**16
# Beyond twice what all sequences at full length hold, blocks only cost their bookkeeping.
USEFUL_SHARE = 2


class DoesNotFit(Exception):
    """A length of sequences that the model does not take, or that the blocks do not hold."""


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


def max_useful_blocks(max_num_seqs: int, max_model_len: int, block_size: int, num_kv_groups: int = 1) -> int:
    """Returns the number of device blocks, scratch among them, beyond which more are of no use."""
    return USEFUL_SHARE * max_num_seqs * -(-max_model_len // block_size) * num_kv_groups + 1


def choose_max_model_len(
    asked: int | Literal["auto"],
    model_max_model_len: int,
    num_device_blocks: int,
    block_size: int,
    kv_blocks: KvBlocks | None = None,
) -> int:
    """Chooses the tokens that a sequence may have; auto: what the model takes and the blocks hold.

    Args:
        asked: the tokens, or auto.
        model_max_model_len: what the model takes.
        num_device_blocks: scratch among them.
        block_size: tokens of a block.
        kv_blocks: the blocks that sequences have; None: one for each `block_size` tokens.

    Raises:
        DoesNotFit: they are not as many as asked, or none.
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
