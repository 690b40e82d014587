"""Values in 8 bits, e4m3: rows quantized leaf by leaf, as `kernels.reference.fp8` says, and the library's product.

Rows of a weight are its outputs; rows of activations are quantized when they are multiplied. A row's values and scales
are functions of that row alone.
"""
# Triton's functions are in a language of their own, of which pyright sees the syntax.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 448.0
SMALLEST_MAGNITUDE = 1e-30
"""Leaves whose largest magnitude is below count as zeros."""
# The library's product in 8 bits takes shapes of whole runs of so many.
LIBRARY_MULTIPLE = 16
# The matrix units keep 14 bits of such a sum: longer ones are made in pieces, and added in float32.
MAX_LIBRARY_FEATURES = 4096


@triton.jit
def _quantize(
    rows,
    values,
    scales,
    row_stride,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    FEATURES: tl.constexpr,
    LEAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    m, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    is_feature = k < FEATURES
    wide = tl.load(rows + m * row_stride + leaf * FEATURES + k, mask=is_feature, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide))
    # Rounded as the definition's are: `/` alone may be in the last place on a GPU.
    inverse = tl.where(largest < SMALLEST, 0.0, tl.div_rn(LARGEST, tl.maximum(largest, SMALLEST)))
    target = values + m * (LEAVES * FEATURES) + leaf * FEATURES + k
    tl.store(target, (wide * inverse).to(values.dtype.element_ty), mask=is_feature)
    tl.store(scales + m * LEAVES + leaf, tl.div_rn(largest, LARGEST))


def quantize(rows: Tensor, leaves: int = 1) -> tuple[Tensor, Tensor]:
    """Quantizes each leaf of each row [R, K] by its largest magnitude, in one pass.

    Returns:
        [R, K] float8_e4m3fn, and [R, leaves] float32: what 1 is worth. A leaf that holds a number not finite gives
        products that are none.
    """
    num_rows, in_features = rows.shape
    values = rows.new_empty(num_rows, in_features, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(num_rows, leaves, dtype=torch.float32)
    if num_rows:
        _quantize[(num_rows, leaves)](
            rows,
            values,
            scales,
            rows.stride(0),
            LARGEST=LARGEST,
            SMALLEST=SMALLEST_MAGNITUDE,
            FEATURES=in_features // leaves,
            LEAVES=leaves,
            BLOCK=triton.next_power_of_2(in_features // leaves),
            num_warps=8,
        )
    return values, scales


def suits_library(weight: Tensor) -> bool:
    """Returns whether the library multiplies by a weight [N, K] of this shape."""
    return all(size % LIBRARY_MULTIPLE == 0 for size in weight.shape)


def library_product(values: Tensor, weight: Tensor, one: Tensor) -> Tensor:
    """Multiplies [M, K] by a weight [N, K], both float8_e4m3fn, by the library -> [M, N] float32, not scaled.

    Rows and columns are scaled after it: products that the library scales by rows are slower (pytorch #147971), and in
    half floats these would overflow. `one` is [] float32, on the device.
    """
    products = [
        torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=True)
        for left, right in zip(
            values.split(MAX_LIBRARY_FEATURES, 1), weight.split(MAX_LIBRARY_FEATURES, 1), strict=True
        )
    ]
    for product in products[1:]:
        products[0] += product
    return products[0]
