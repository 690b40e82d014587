"""Products of quantized weights in a checkpoint's own format: every backend gives the same bits.

4-bit weights: inputs form groups of 32, 64 or 128 neighbours. Rows are quantized group by group, as `int8` quantizes
whole rows. A group's sum of `row level * (weight level - zero point)` is an integer below 2 ** 24, which float32 holds
exactly for any order of summation. It is multiplied by the product of both scales. The groups of a leaf are added to
zero in their order, and the leaves are added as a tree.

8-bit weights: as in `int8`, with the levels and scales of the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockyard_kernels.reference.int8 import quantize_rows
from blockyard_kernels.shapes import PLAIN_LINEAR, LinearSpec, add_leaves

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.packed import QuantizedWeight
    from blockyard_kernels.reference.linear import Method


def linear_quantized(hidden: Tensor, weight: QuantizedWeight, leaves: int = 1) -> Tensor:
    """Multiplies rows [R, in_features] by a quantized weight -> [R, rows of the weight] float32."""
    if weight.order is not None:
        hidden = hidden[:, weight.order]
    product = _grouped_product if weight.zeros is not None else _product
    width = hidden.shape[1] // leaves
    return add_leaves([product(part, weight, leaf * width) for leaf, part in enumerate(hidden.split(width, 1))])


def _product(hidden: Tensor, weight: QuantizedWeight, first: int) -> Tensor:
    levels, row_scales = quantize_rows(hidden)
    weight_levels = weight.levels[:, first : first + hidden.shape[1]]
    sums = torch.mm(levels.double(), weight_levels.double().T)
    return sums.float() * row_scales[:, None] * weight.scales[:, 0]


def _grouped_product(hidden: Tensor, weight: QuantizedWeight, first: int) -> Tensor:
    assert weight.zeros is not None
    total = torch.zeros(len(hidden), weight.num_rows, device=hidden.device)
    for index, part in enumerate(hidden.split(weight.group, 1), first // weight.group):
        begin = index * weight.group
        levels, row_scales = quantize_rows(part)
        shifted = weight.levels[:, begin : begin + weight.group].float() - weight.zeros[:, index, None].float()
        sums = torch.mm(levels.float(), shifted.T)
        total = total + sums * (weight.scales[:, index] * row_scales[:, None])
    return total


class ReferenceQuantized:
    """Same interface as `ReferenceLinear`. Only its adapters use `method`, since its own products are exact."""

    is_table = False

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, method: Method, spec: LinearSpec = PLAIN_LINEAR
    ) -> None:
        self.num_rows, self.in_features = weight.levels.shape
        self.leaves, self.method = spec.leaves, method
        self.is_gated, self.is_partial = spec.gated, spec.partial
        self.out_features = self.num_rows // 2 if spec.gated else self.num_rows
        self.activation, self.logits = spec.activation, spec.logits
        self.dtype, self.device = weight.dtype, weight.levels.device
        self.layout = "8 bits" if weight.zeros is None else f"4 bits in groups of {weight.group}"
        self._weight, self._bias = weight, bias

    @property
    def num_bytes(self) -> int:
        weight = self._weight
        held = (weight.levels, weight.scales, weight.zeros, weight.order, self._bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight [rows, in_features] float32 and a copy of the bias [rows]."""
        return self._weight.dequantize(), None if self._bias is None else self._bias.clone()

    def unrounded(self, hidden: Tensor) -> Tensor:
        """Multiplies -> float32; the products of a partial weight do not include the bias."""
        sums = linear_quantized(hidden, self._weight, self.leaves)
        return sums if self.is_partial else self.biased(sums)

    def biased(self, sums: Tensor) -> Tensor:
        """Adds the bias to the sums [R, out_features] of all ranks."""
        return sums if self._bias is None else sums + self._bias.float()
