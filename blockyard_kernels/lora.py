"""Low-rank adapters (LoRA) of linear layers.

A weight has slots, and each slot holds one adapter: its factors `shrink` (A) [width, in_features] and `expand` (B)
[rows of the weight, width], the second with the adapter's scale. For a row x whose adapter is in a slot:

    u = round(shrink x)                             float32 sums over leaves and ranks, as in the weight's own product
    y = round((weight x + bias) + expand u)         float32 sums; before the activation of a gated weight

Rows without an adapter have the same bits as without slots, and no row's bits depend on other rows. A backend whose
library rounds the products adds `expand u` to the rounded products.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.packed import PackedLinear


@dataclass(frozen=True, eq=False)
class LoraRows:
    """The adapters of a step's rows; only made for a step in which some row has an adapter."""

    slots: npt.NDArray[np.int32]
    """[T], contiguous: the slot of each row's adapter; -1: none."""
    work_lists: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)
    """A cache of the backend: the rows in its order, which the first layer makes and later layers reuse."""

    @cached_property
    def by_slot(self) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """The slots in use in ascending order, each with its rows in ascending order."""
        return [(int(slot), np.flatnonzero(self.slots == slot)) for slot in np.unique(self.slots) if slot >= 0]


@dataclass(frozen=True, eq=False)
class VirtualRows:
    """Embedding rows for ids beyond the vocabulary: the soft prompts of adapters."""

    first_id: int
    """The id of the first row; it is above the ids of all tokens."""
    rows: Tensor
    """[any, width], in the model's dtype; the contents change between steps."""


class PackedLora(Protocol):
    """An adapter's factors of one weight, in the backend's own layout."""

    @property
    def num_bytes(self) -> int: ...


class LoraOps(Protocol):
    """The ops that manage adapters. A weight can hold adapters after `make_room`."""

    def make_room(self, packed: PackedLinear, num_slots: int, max_width: int, arena: Arena | None = None) -> int:
        """Gives a packed weight empty slots.

        Args:
            packed: the weight.
            num_slots: the number of slots.
            max_width: the width of the largest adapter.
            arena: the arena for the slots, if they take memory; None: newly allocated memory.

        Returns:
            Bytes of device memory outside the slots that the factors of the largest adapter take for this weight.
        """
        ...

    def pack(self, packed: PackedLinear, shrink: Tensor, expand: Tensor) -> PackedLora:
        """Packs copies of an adapter's factors for a weight, in the model's dtype.

        May run in one other thread while the compute thread works.

        Args:
            packed: the weight, which has slots.
            shrink: [width, in_features], at most max_width.
            expand: [rows of the weight in their original order, width].
        """
        ...

    def write(self, packed: PackedLinear, slot: int, lora: PackedLora | None) -> None:
        """Puts an adapter into a slot of a weight, or empties the slot (None), from the next product on."""
