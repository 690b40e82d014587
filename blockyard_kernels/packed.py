"""The forms of a linear layer's weight: quantized by a checkpoint, and packed by a backend. Knows no op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

GROUPS = (128, 64, 32)
"""The group sizes of 4-bit weights, in input features."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """An integer weight whose float value is `(levels - zeros) * scales`, with one scale per output and input group."""

    dtype: torch.dtype
    """The dtype of the rows that it multiplies."""
    levels: Tensor
    """[rows, in_features]: int8; or uint8 below 16 (4 bits) if there are `zeros`."""
    scales: Tensor
    """[rows, groups] float32; int8 weights have one group."""
    zeros: Tensor | None = None
    """[rows, groups] uint8: zero points, at most 16; None for int8."""
    order: Tensor | None = None
    """[in_features] int64: the input feature that each column multiplies; None: columns are in input order."""

    @property
    def num_rows(self) -> int:
        return len(self.levels)

    @property
    def group(self) -> int:
        """The number of inputs in a group."""
        return self.levels.shape[1] // self.scales.shape[1]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """Applies `change` to each tensor that has one row per output."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, levels=change(self.levels), scales=change(self.scales), zeros=zeros)

    def dequantize(self) -> Tensor:
        """Returns the weight [rows, in_features] float32, its columns in the order of the input features."""
        levels = self.levels.float().unflatten(1, (self.scales.shape[1], self.group))
        zeros = 0 if self.zeros is None else self.zeros.float()[:, :, None]
        weight = ((levels - zeros) * self.scales[:, :, None]).flatten(1)
        return weight if self.order is None else weight[:, self.order.argsort()]


WeightRows = Tensor | Sequence[Tensor] | QuantizedWeight
"""A whole weight, its rows in several parts, or a weight that a checkpoint has quantized."""


class PackedLinear(Protocol):
    """A weight in the backend's own layout, with its bias. It replaces the tensor that it was made from."""

    in_features: int
    out_features: int
    """Outputs of the product: half the rows of a gated weight."""
    is_table: bool
    """Whether `Backend.embedding` can take rows from it, so that a tied table need not be held twice."""
    is_partial: bool
    """Whether other ranks hold the rest of its inner dimension."""

    layout: str
    """The format of the weight, in words."""

    @property
    def num_bytes(self) -> int: ...

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns copies of the weight [rows, in_features], as products use it, and of the bias [rows]."""
        ...
