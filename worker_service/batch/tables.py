"""Finds blocks in the tables of rows. `progress` [rows] and `tables` [rows, widest] are those of the input batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from worker_service.batch.rows import BatchLimits
    from worker_service.step import Array


def find_filled(
    progress: npt.NDArray[np.void], tables: npt.NDArray[Any], rows: list[int], limits: BatchLimits
) -> list[int]:
    """Returns the blocks of some rows that hold tokens which some query may still see, sorted."""
    filled: set[int] = set()
    num_tokens = progress["num_computed_tokens"][rows]
    for group, window in enumerate(limits.kv_windows):
        own = tables[rows, group :: limits.num_kv_groups]
        places = np.arange(own.shape[1])
        first = np.maximum(num_tokens - window + 1, 0) // limits.block_size if window else 0 * num_tokens
        is_filled = (places < -(-num_tokens // limits.block_size)[:, None]) & (places >= first[:, None])
        filled.update(own[is_filled].tolist())
    return sorted(filled)


def find_kept(progress: npt.NDArray[np.void], tables: npt.NDArray[Any], rows: Array, limits: BatchLimits) -> Array:
    """Returns the blocks of some rows in the KV groups that keep all tokens, row by row."""
    ends = progress["num_blocks"][rows, None]
    kept = [group for group, window in enumerate(limits.kv_windows) if not window]
    parts = [np.arange(group, tables.shape[1], limits.num_kv_groups) for group in kept]
    found = [tables[rows][:, places][places < ends] for places in parts]
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)
