"""Copies whole blocks between pools and within one: bytes only, no arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from blockyard_kernels.launching import upload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy.typing as npt
    from torch import Tensor

    from blockyard_kernels.ops import BlockPairs

    Integers = npt.NDArray[np.integer[Any]]


def swap_blocks(
    source_pool: Tensor, destination_pool: Tensor, pairs: BlockPairs, *, non_blocking: bool = False
) -> None:
    """See `blockyard_kernels.ops.Backend.swap_blocks`. If `non_blocking`, may return before the bytes arrive."""
    if source_pool.shape[1:] != destination_pool.shape[1:] or source_pool.dtype != destination_pool.dtype:
        raise ValueError(
            f"pools differ in layout: blocks of {tuple(source_pool.shape[1:])} {source_pool.dtype} "
            f"and of {tuple(destination_pool.shape[1:])} {destination_pool.dtype}"
        )
    _check_ids((source for source, _ in pairs), source_pool, "source")
    _check_ids((destination for _, destination in pairs), destination_pool, "destination")
    _copy_runs(source_pool, destination_pool, pairs, non_blocking=non_blocking)


def copy_blocks(pool: Tensor, pairs: BlockPairs) -> None:
    """See `blockyard_kernels.ops.Backend.copy_blocks`."""
    if not pairs:
        return
    _check_ids((block for pair in pairs for block in pair), pool, "block")
    if {source for source, _ in pairs}.isdisjoint(destination for _, destination in pairs):
        # No block is both a source and a destination: no temporary copy is needed.
        _copy_runs(pool, pool, pairs, non_blocking=True)
        return
    columns = upload(np.array(pairs, np.int64), pool.device)
    pool.index_copy_(0, columns[:, 1], pool.index_select(0, columns[:, 0]))


def clear_slots(pool: Tensor, block_ids: Integers, slots: Integers) -> None:
    """See `blockyard_kernels.ops.Backend.clear_slots`."""
    pool[upload(block_ids, pool.device), :, :, :, upload(slots, pool.device)] = 0


def _check_ids(block_ids: Iterable[int], pool: Tensor, role: str) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < pool.shape[0]:
            raise ValueError(f"{role} {block_id} is outside a pool of {pool.shape[0]} blocks")


def _copy_runs(source_pool: Tensor, destination_pool: Tensor, pairs: BlockPairs, *, non_blocking: bool) -> None:
    for source, destination, length in _runs(pairs):
        from_blocks, to_blocks = source_pool[source : source + length], destination_pool[destination:]
        to_blocks[:length].copy_(from_blocks, non_blocking=non_blocking)


def _runs(pairs: BlockPairs) -> Iterator[tuple[int, int, int]]:
    """Joins pairs of consecutive blocks, which one copy moves, into (first source, first destination, length)."""
    start, length = (0, 0), 0
    for source, destination in pairs:
        if length and (source, destination) == (start[0] + length, start[1] + length):
            length += 1
            continue
        if length:
            yield *start, length
        start, length = (source, destination), 1
    if length:
        yield *start, length
