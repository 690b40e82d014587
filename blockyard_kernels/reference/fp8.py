"""Defines a product by a weight in 8-bit floating point, e4m3, in torch.

When a weight is packed, each row (output) is quantized separately in each leaf, as in int8. Activations are not
quantized: with three mantissa bits on both sides a model's error would be twice as large. Sums are float64 here and
float32 in backends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockyard_kernels.shapes import add_leaves

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448
SMALLEST_MAGNITUDE = 1e-30
"""Rows whose largest magnitude is below this are treated as zeros."""


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes each row [R, K], scaled by its largest magnitude; rounds to the nearest value, ties to even.

    Returns:
        Values [R, K] float8_e4m3fn and scales [R] float32.
    """
    wide = rows.float()
    largest = wide.abs().amax(1)
    # torch computes number / tensor by the reciprocal, which rounds twice; tensor / tensor rounds once.
    inverse = torch.where(largest < SMALLEST_MAGNITUDE, 0, torch.full_like(largest, LARGEST) / largest)
    return (wide * inverse[:, None]).to(torch.float8_e4m3fn), largest / torch.full_like(largest, LARGEST)


def linear_fp8(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, leaves: int = 1) -> Tensor:
    """Quantizes a weight [N, K], and multiplies rows [R, K] by it -> [R, N] float32."""
    width = weight.shape[1] // leaves
    sums = [_leaf_sum(*pair) for pair in zip(hidden.split(width, 1), weight.split(width, 1), strict=True)]
    result = add_leaves(sums)
    return result if bias is None else result + bias.float()


def _leaf_sum(hidden: Tensor, weight: Tensor) -> Tensor:
    values, scales = quantize_rows(weight)
    return torch.mm(hidden.double(), values.double().T).float() * scales
