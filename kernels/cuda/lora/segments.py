"""The rows of a step by the slots that they have, on the device: the sizes of launches are known without looking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.launching import upload

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch
    from torch import Tensor

    from kernels.lora import LoraRows

TILE_ROWS = 16
"""Rows that are multiplied together, however many there are: so all get the same instructions."""
ALIGNMENT = 4
"""Words: columns begin at addresses that a kernel may read 16 bytes of at once, as those of tensors do."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Rows sorted by slot."""

    order: Tensor
    """[T] int32: rows, those without an adapter first."""
    bounds: Tensor
    """[slots + 1] int32: where the rows of each slot begin in `order`, and where those of the last one end."""
    num_tiles: int
    """At least the tiles that hold the rows of all slots, none of them those of two."""

    @classmethod
    def of(cls, lora: LoraRows, num_slots: int, device: torch.device) -> Segments:
        """Returns a step's, which are made once."""
        found = lora.work_lists.get(cls)
        if found is None:
            bounds, order = sort_rows(lora.slots, num_slots)
            # Both begin where those of a graph do: compiled code depends on that.
            filling = np.zeros(-len(bounds) % ALIGNMENT, np.int32)
            words = upload(np.concatenate([bounds, filling, order]), device)
            num_tiles = int((-(-np.diff(bounds) // TILE_ROWS)).sum())
            found = lora.work_lists[cls] = cls(words[len(bounds) + len(filling) :], words[: len(bounds)], num_tiles)
        return found


def sort_rows(
    slots: npt.NDArray[np.integer[Any]], num_slots: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns bounds [slots + 1] and order [T] of rows with these slots [T]; -1: none."""
    order = np.argsort(slots, kind="stable")
    bounds = np.searchsorted(slots[order], np.arange(num_slots + 1))
    return bounds.astype(np.int32), order.astype(np.int32)


def most_tiles(num_rows: int, num_slots: int) -> int:
    """Returns how many tiles so many rows may take: each slot's last one may hold a single row."""
    return min(num_rows, (num_rows + num_slots * (TILE_ROWS - 1)) // TILE_ROWS)
