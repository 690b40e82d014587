"""Low-rank adapters (LoRA) of linear layers: what an adapter adds to the products of the rows that have it.

Slots of a weight hold adapters, each of two factors: `shrink` [width, in_features] and `expand` [rows of the weight,
width], its scale in the second. Of a row x whose adapter is in a slot:

    u = round(shrink x)                             summed in float32, over the weight's leaves and ranks as its product
    y = round((weight x + bias) + expand u)         each sum in float32; before the activation of a gated weight

Rows without an adapter have the bits that they have where there are no slots, and no row's bits depend on the rows
beside it. A backend whose products come rounded adds to what is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.arena import Arena
    from kernels.packed import PackedLinear


@dataclass(frozen=True, eq=False)
class LoraRows:
    """The rows of a step that have an adapter; only made for a step with such rows."""

    slots: npt.NDArray[np.int32]
    """[T], contiguous: the slot of each row's adapter; -1: none."""
    work_lists: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False)
    """The backend's own order of the rows, kept for the layers after the first."""

    @cached_property
    def by_slot(self) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """The slots that rows have, growing, and the rows of each, growing."""
        return [(int(slot), np.flatnonzero(self.slots == slot)) for slot in np.unique(self.slots) if slot >= 0]


@dataclass(frozen=True, eq=False)
class VirtualRows:
    """Rows that an embedding takes for ids which are no tokens: the soft prompts of adapters."""

    first_id: int
    """The id of the first row, above those of all tokens."""
    rows: Tensor
    """[any, width], in the model's dtype; written to between steps."""


class PackedLora(Protocol):
    """An adapter's factors of one weight, in the backend's own layout."""

    @property
    def num_bytes(self) -> int: ...


class LoraOps(Protocol):
    """The ops for adapters beside `Backend.linear`. A weight takes adapters once there is room."""

    def make_room(self, packed: PackedLinear, num_slots: int, max_width: int, arena: Arena | None = None) -> int:
        """Gives a packed weight slots, which are empty.

        Args:
            packed: the weight.
            num_slots: how many.
            max_width: of the largest adapter.
            arena: where the slots go, if they take memory; None: memory of their own.

        Returns:
            The bytes of the device's memory that the largest adapter's factors of it take outside of the slots.
        """
        ...

    def pack(self, packed: PackedLinear, shrink: Tensor, expand: Tensor) -> PackedLora:
        """Packs the factors of an adapter for a weight, in the model's dtype; keeps neither.

        May run in one thread beside the one that computes.

        Args:
            packed: the weight, which has slots.
            shrink: [width, in_features], at most max_width.
            expand: [rows of the weight as they were given, width].
        """
        ...

    def write(self, packed: PackedLinear, slot: int, lora: PackedLora | None) -> None:
        """Sets what a slot of a weight holds, from the next product on; None: nothing. Keeps what it is given."""
        ...
