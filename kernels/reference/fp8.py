"""Defines a product by a weight in 8-bit floating point, e4m3, in torch.

A weight is quantized leaf by leaf when it is packed, its rows being outputs, as in int8. What it is multiplied by stays
as it is: with three digits of both sides a model's predictions would go twice as far astray. Sums are float64's here; a
backend's are float32's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.shapes import add_leaves

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448
SMALLEST_MAGNITUDE = 1e-30
"""Rows whose largest magnitude is below count as zeros."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row [R, K] by its largest magnitude, rounding to the nearest, and to even between two.

    Returns:
        [R, K] float8_e4m3fn, and [R] float32: what 1 is worth.
    """
    wide = rows.float()
    largest = wide.abs().amax(1)
    # A number divided by a tensor would be multiplied by the reciprocal, which rounds twice.
    inverse = torch.where(largest < SMALLEST_MAGNITUDE, 0, torch.full_like(largest, LARGEST) / largest)
    return (wide * inverse[:, None]).to(torch.float8_e4m3fn), largest / torch.full_like(largest, LARGEST)


def linear_fp8(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, leaves: int = 1) -> Tensor:
    """Multiplies rows [R, K] by a weight [N, K], which is quantized -> [R, N] float32."""
    width = weight.shape[1] // leaves
    sums = [_leaf_sum(*pair) for pair in zip(hidden.split(width, 1), weight.split(width, 1), strict=True)]
    result = add_leaves(sums)
    return result if bias is None else result + bias.float()


def _leaf_sum(hidden: Tensor, weight: Tensor) -> Tensor:
    values, scales = quantize_rows(weight)
    return torch.mm(hidden.double(), values.double().T).float() * scales
