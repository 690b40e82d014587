"""Defines, in torch, products in int8, and keys and values in int8. Every backend must give the same bits of both.

Each row of both factors is quantized separately in each leaf: weights, whose rows are outputs, when they are packed,
and activations when they are multiplied. Sums of integers are exact, so a row's bits depend on that row only, and the
order of summation matters only between leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockyard_kernels.shapes import add_leaves

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 127
SMALLEST_MAGNITUDE = 1e-30
"""Rows whose largest magnitude is below this are treated as zeros."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row [R, K], scaled by its largest magnitude; rounds to the nearest level, ties to even.

    Returns:
        Levels [R, K] int8 from -127 to 127 and scales [R] float32. The scale is NaN if the row is not finite.
    """
    wide = rows.float()
    largest = wide.abs().amax(1)
    # torch computes number / tensor by the reciprocal, which rounds twice; tensor / tensor rounds once.
    inverse = torch.where(largest < SMALLEST_MAGNITUDE, 0, torch.full_like(largest, LEVELS) / largest)
    levels = (wide * inverse[:, None]).round().nan_to_num(0).to(torch.int8)
    return levels, torch.where(largest.isfinite(), largest / LEVELS, torch.nan)


def quantize_heads(heads: Tensor) -> Tensor:
    """Quantizes keys or values [T, K, D] as rows are -> [T, K, D + 4] int8, the last 4 bytes of each its scale."""
    levels, scales = quantize_rows(heads.flatten(0, 1))
    return torch.cat([levels, scales[:, None].view(torch.int8)], 1).view(*heads.shape[:2], -1)


def read_heads(heads: Tensor) -> Tensor:
    """Returns keys or values of a pool [..., D] in float32; [..., D + 4] int8 are turned into what they are worth."""
    if heads.dtype != torch.int8:
        return heads.float()
    scales = heads[..., -torch.float32.itemsize :].contiguous().view(torch.float32)
    return heads[..., : -torch.float32.itemsize].float() * scales


def linear_int8(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, leaves: int = 1) -> Tensor:
    """Quantizes rows [R, K] and a weight [N, K], and multiplies them -> [R, N] float32."""
    width = weight.shape[1] // leaves
    sums = [_leaf_sum(*pair) for pair in zip(hidden.split(width, 1), weight.split(width, 1), strict=True)]
    result = add_leaves(sums)
    return result if bias is None else result + bias.float()


def _leaf_sum(hidden: Tensor, weight: Tensor) -> Tensor:
    levels, row_scales = quantize_rows(hidden)
    weight_levels, scales = quantize_rows(weight)
    # Whole numbers below 2 ** 53 are exact in float64, whatever the order of their sum.
    sums = torch.mm(levels.double(), weight_levels.double().T)
    return sums.float() * row_scales[:, None] * scales
