"""Defines a product in int8, in torch. Every backend has to give its bits.

Both sides are quantized row by row and leaf by leaf: a weight when it is packed, its rows being outputs, and
activations when they are multiplied. Sums of integers are exact, so a row's bits depend on that row alone, and no order
of summing shows but that of the leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.shapes import add_leaves

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = 127
SMALLEST_MAGNITUDE = 1e-30
"""Rows whose largest magnitude is below count as zeros."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row [R, K] by its largest magnitude, rounding to the nearest, and to even between two.

    Returns:
        [R, K] int8 from -127 to 127, and [R] float32: what 1 is worth, not a number in rows that hold one not finite.
    """
    wide = rows.float()
    largest = wide.abs().amax(1)
    # A number divided by a tensor would be multiplied by the reciprocal, which rounds twice.
    inverse = torch.where(largest < SMALLEST_MAGNITUDE, 0, torch.full_like(largest, LEVELS) / largest)
    levels = (wide * inverse[:, None]).round().nan_to_num(0).to(torch.int8)
    return levels, torch.where(largest.isfinite(), largest / LEVELS, torch.nan)


def linear_int8(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, leaves: int = 1) -> Tensor:
    """Multiplies rows [R, K] by a weight [N, K], both quantized -> [R, N] float32."""
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
