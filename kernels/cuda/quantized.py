"""Values in 8 bits: rows quantized leaf by leaf, as `kernels.reference.int8` and `kernels.reference.fp8` say.

Rows of a weight are its outputs; rows of activations are quantized when they are multiplied, if the format says so. A
row's values and scales are functions of that row alone.
"""
# Triton's functions are in a language of their own, of which pyright sees the syntax, and calls take more and other
# arguments than their parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.cuda import launch_table

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_MAGNITUDE = 1e-30
"""Leaves whose largest magnitude is below count as zeros."""
MAX_INT8_FEATURES = 2**17
"""Sums of so many products stay within 32 bits."""
# Added to a number and taken away again it rounds it to a whole one, to even between two.
WHOLE = tl.constexpr(1.5 * 2**23)


@dataclass(frozen=True, slots=True)
class Format:
    """What 8 bits of a weight are."""

    dtype: torch.dtype
    largest: float
    """The largest magnitude of a value: what the largest of a row becomes."""
    quantizes_rows: bool
    """Whether rows that are multiplied are held so too, or else the weight's values become theirs, which is exact."""


INT8 = Format(torch.int8, 127, quantizes_rows=True)
FP8 = Format(torch.float8_e4m3fn, 448, quantizes_rows=False)
FORMATS = {"none": None, "int8": INT8, "fp8": FP8}
"""How weights are held, by the names of `kernels.select`; None: as they came."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """Rows in 8 bits."""

    rows: Tensor
    """[R, K]: what they were."""
    values: Tensor
    """[R, K] in the format's dtype."""
    scales: Tensor
    """[R, leaves] float32: what 1 is worth, not a number in a leaf that holds one not finite."""

    @classmethod
    def empty(cls, rows: Tensor, into: Format, leaves: int = 1) -> Quantized:
        """Makes room for rows [R, K]."""
        values = rows.new_empty(*rows.shape, dtype=into.dtype)
        return cls(rows, values, rows.new_empty(len(rows), leaves, dtype=torch.float32))


@triton.jit
def quantize_leaf(wide, values, scale, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, is_feature):
    """Writes a leaf's numbers (float32, zeros where there is no feature) to `values`, and what 1 is worth."""
    magnitudes = tl.abs(wide)
    largest = tl.max(magnitudes)
    num_strange = tl.sum(tl.where(magnitudes < float("inf"), 0, 1))
    # Rounded as the definition's are: `/` alone may be in the last place on a GPU.
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
            # A product and a sum that were fused would be rounded once, and the definition's are rounded twice.
            **launch_table.norm_launch(features).options,
        )
    return made
