"""The rows of a step sorted by LoRA slot, on the device. Launch sizes do not depend on values on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from blockyard_kernels.launching import upload

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from blockyard_kernels.lora import LoraRows

TILE_ROWS = 16
"""Rows of a tile, for any number of rows, so that the same instructions multiply all rows."""
ALIGNMENT = 4
"""In words: columns start at multiples of 16 bytes, as tensors do, so that a kernel may read 16 bytes at once."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Rows sorted by slot."""

    order: Tensor
    """[T] int32: rows, those without an adapter first."""
    bounds: Tensor
    """[slots + 1] int32: the place in `order` where each slot's rows begin, and the end of the last slot's rows."""
    num_tiles: int
    """An upper bound of the tiles for all rows with adapters, where each tile has rows of one slot."""

    @classmethod
    def of(cls, lora: LoraRows, num_slots: int, device: torch.device) -> Segments:
        """Returns the segments of a step, which are made at the first call."""
        found = lora.work_lists.get(cls)
        if found is None:
            bounds, order = sort_rows(lora.slots, num_slots)
            # Both columns are aligned as in a captured graph, since compiled code depends on the alignment.
            filling = np.zeros(-len(bounds) % ALIGNMENT, np.int32)
            words = upload(np.concatenate([bounds, filling, order]), device)
            num_tiles = int((-(-np.diff(bounds) // TILE_ROWS)).sum())
            found = lora.work_lists[cls] = cls(words[len(bounds) + len(filling) :], words[: len(bounds)], num_tiles)
        return found


def sort_rows(
    slots: npt.NDArray[np.integer[Any]], num_slots: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns bounds [slots + 1] and order [T] of rows whose slots are `slots` [T]; -1: no adapter."""
    order = np.argsort(slots, kind="stable")
    bounds = np.searchsorted(slots[order], np.arange(num_slots + 1))
    return bounds.astype(np.int32), order.astype(np.int32)


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Returns the most tiles that `num_rows` rows may take: the last tile of each slot may hold a single row."""
    return min(num_rows, (num_rows + num_slots * (TILE_ROWS - 1)) // TILE_ROWS)
