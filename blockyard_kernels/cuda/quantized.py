"""Rows in 8 bits: each leaf of a row is quantized as `int8` and `fp8` of `blockyard_kernels.reference` define.

Rows of a weight are its outputs. Rows of activations are quantized before a product if the format requires it. A row's
values and scales depend on that row only.
"""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_MAGNITUDE = 1e-30
"""Leaves whose largest magnitude is below this are treated as zeros."""
MAX_INT8_FEATURES = 2**17
"""Sums of this many int8 products fit into 32 bits."""
# Adding and subtracting this rounds a float32 number to the nearest integer, ties to even.
WHOLE = tl.constexpr(1.5 * 2**23)


@dataclass(frozen=True, slots=True)
class Format:
    """A format of 8-bit values."""

    dtype: torch.dtype
    largest: float
    """The largest magnitude of a value. Scales map the largest magnitude of a leaf to it."""
    quantizes_rows: bool
    """Whether activations are quantized too. If not, the weight's values are converted exactly to their dtype."""


INT8 = Format(torch.int8, 127, quantizes_rows=True)
FP8 = Format(torch.float8_e4m3fn, 448, quantizes_rows=False)
FORMATS = {"none": None, "int8": INT8, "fp8": FP8}
"""The formats of weights by the names in `blockyard_kernels.select`; None: weights are not quantized."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Rows in 8 bits."""

    rows: Tensor
    """[R, K]: the rows before quantization."""
    values: Tensor
    """[R, K] in the format's dtype."""
    scales: Tensor
    """[R, leaves] float32; NaN for a leaf with a number that is not finite."""

    @classmethod
    def empty(cls, rows: Tensor, into: Format, leaves: int = 1) -> Quantized:
        """Allocates values and scales for rows [R, K]."""
        values = rows.new_empty(*rows.shape, dtype=into.dtype)
        return cls(rows, values, rows.new_empty(len(rows), leaves, dtype=torch.float32))


@triton.jit
def quantize_leaf(wide, values, scale, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, is_feature):
    """Quantizes a leaf `wide` (float32, zeros past its features), and writes its values and its scale."""
    magnitudes = tl.abs(wide)
    largest = tl.max(magnitudes)
    num_strange = tl.sum(tl.where(magnitudes < float("inf"), 0, 1))
    # Rounded as in the reference: a plain `/` may differ in the last digit on a GPU.
    inverse = tl.where(largest < SMALLEST, 0.0, tl.div_rn(LARGEST, tl.maximum(largest, SMALLEST)))
    scaled = wide * inverse
    if values.dtype.element_ty == tl.int8:
        scaled = scaled + WHOLE - WHOLE
    tl.store(values, scaled.to(values.dtype.element_ty), mask=is_feature)
    tl.store(scale, tl.where(num_strange == 0, tl.div_rn(largest, LARGEST), float("nan")))


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
    target = values + m * (LEAVES * FEATURES) + leaf * FEATURES + k
    quantize_leaf(wide, target, scales + m * LEAVES + leaf, LARGEST, SMALLEST, is_feature)


def quantize(rows: Tensor, into: Format, leaves: int = 1) -> Quantized:
    """Quantizes each leaf of each row [R, K], of any row stride, by its largest magnitude, in one pass."""
    made = Quantized.empty(rows, into, leaves)
    num_rows, in_features = rows.shape
    features = in_features // leaves
    if num_rows:
        _quantize[(num_rows, leaves)](
            rows,
            made.values,
            made.scales,
            rows.stride(0),
            LARGEST=float(into.largest),
            SMALLEST=SMALLEST_MAGNITUDE,
            FEATURES=features,
            LEAVES=leaves,
            # A fused product and sum would be rounded once; the reference rounds both.
            **launch_table.norm_launch(features).options,
        )
    return made
