"""Checks what a worker is asked for its block pools: their sizes, and numbers of their blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.capacity.limits import KvBlocks, wrong_block_size, wrong_step_size
from blockyard.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blockyard.contract.workers import CachePlan

# Numbers of blocks have 31 bits in every kernel.
MAX_BLOCKS = 2**31 - 1


def wrong_cache_request(
    request: CachePlan, model_max_len: int, kv_windows: tuple[int, ...] = (0,)
) -> Iterable[Violation]:
    """Yields the faults of a cache request for a model that takes `model_max_len` tokens."""
    yield from wrong_block_size(request.block_size)
    yield from wrong_step_size(request.max_num_batched_tokens, request.max_num_seqs)
    if request.max_model_len < 1:
        yield Violation("max_model_len", "must be at least 1")
    for name in ("num_device_blocks", "num_host_blocks"):
        if getattr(request, name) > MAX_BLOCKS:
            yield Violation(name, f"must be at most {MAX_BLOCKS}")
    if request.max_draft_tokens > request.max_draft_rows:
        yield Violation("max_draft_tokens", f"is more than max_draft_rows, {request.max_draft_rows}")
    if request.num_state_blocks and request.max_draft_tokens:
        yield Violation("max_draft_tokens", "wrong drafts would change the state of a sequence")
    if request.num_device_blocks < 2:
        yield Violation("num_device_blocks", "must be at least 2: block 0 is scratch")
        return
    if request.max_model_len > model_max_len:
        yield Violation("max_model_len", f"{request.max_model_len} is more than the model's {model_max_len} tokens")
    kv_blocks = KvBlocks(request.block_size, kv_windows, num_state_blocks=min(request.num_state_blocks, MAX_BLOCKS))
    capacity = kv_blocks.count_tokens(request.num_device_blocks - 1)
    if capacity is not None and request.max_model_len > capacity:
        yield Violation(
            "max_model_len", f"{request.max_model_len} is more than the {capacity} tokens that the blocks hold"
        )


def wrong_state_blocks(request: CachePlan, num_needed: int) -> Iterable[Violation]:
    """Yields a fault if a sequence's state needs more blocks on this rank than a cache request gives."""
    if request.num_state_blocks < num_needed:
        yield Violation("num_state_blocks", f"the state of a sequence needs {num_needed} blocks on this rank")


def wrong_block_ids(field: str, block_ids: Sequence[int], num_blocks: int) -> Iterable[Violation]:
    """Yields a fault for each id beyond a pool of `num_blocks`."""
    if any(block_id >= num_blocks for block_id in block_ids):
        yield Violation(field, f"blocks must be below {num_blocks}")
