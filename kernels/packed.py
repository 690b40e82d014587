"""A weight of a product as a checkpoint has quantized it, and as a backend holds it. Knows no op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS = (128, 64, 32)
"""Inputs of a group of a weight of four bits."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight in whole numbers: in floats it is `(levels - zeros) * scales`, each scale for a group of inputs."""

    dtype: torch.dtype
    """Of what it multiplies."""
    levels: Tensor
    """[rows, in_features]: int8, or, with zeros, uint8 below 16."""
    scales: Tensor
    """[rows, groups] float32; with int8 of one group."""
    zeros: Tensor | None = None
    """[rows, groups] uint8, at most 16."""
    order: Tensor | None = None
    """[in_features] int64: for each column its place in the rows that are multiplied; None: the columns' order."""

    @property
    def num_rows(self) -> int:
        """Outputs."""
        return len(self.levels)

    @property
    def group(self) -> int:
        """Inputs of a group."""
        return self.levels.shape[1] // self.scales.shape[1]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> QuantizedWeight:
        """Changes what has a row for each output."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, levels=change(self.levels), scales=change(self.scales), zeros=zeros)

    def dequantize(self) -> Tensor:
        """Returns the weight [rows, in_features] float32, its columns in the order of what they multiply."""
        levels = self.levels.float().unflatten(1, (self.scales.shape[1], self.group))
        zeros = 0 if self.zeros is None else self.zeros.float()[:, :, None]
        weight = ((levels - zeros) * self.scales[:, :, None]).flatten(1)
        return weight if self.order is None else weight[:, self.order.argsort()]


WeightRows = Tensor | Sequence[Tensor] | QuantizedWeight
"""A weight, its rows in parts, or as it was quantized."""


class PackedLinear(Protocol):
    """A weight in the backend's own layout, with its bias. It replaces the tensor that it was made from."""

    in_features: int
    out_features: int
    """Of the product: of a gated weight half its rows."""
    is_table: bool
    """Whether `Backend.embedding` can take rows from it, so that a tied table need not be held twice."""
    is_partial: bool
    """Whether other ranks hold the rest of its inner dimension."""

    layout: str
    """The format of the weight, in words."""

    @property
    def num_bytes(self) -> int: ...

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns copies of the weight [rows, in_features] that rows are multiplied by, and of the bias [rows]."""
        ...
