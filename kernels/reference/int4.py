"""Defines, in torch, products with weights that a checkpoint has quantized. Every backend must give the same bits.

4-bit weights: inputs form groups of 32, 64 or 128 neighbours. Rows are quantized group by group, as `int8` quantizes
whole rows. A group's sum of `row level * (weight level - zero point)` is an integer below 2 ** 24, which float32 holds
exactly for any order of summation. It is multiplied by the product of both scales. The groups of a leaf are added to
zero in their order, and the leaves are added as a tree.

8-bit weights: as in `int8`, with the levels and scales of the checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.reference.int8 import quantize_rows
from kernels.shapes import add_leaves

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.packed import QuantizedWeight


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
