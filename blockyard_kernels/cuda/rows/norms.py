"""Norms and sums of rows, in Triton. See `blockyard_kernels.ops`, and `cuda.elementwise` for the bits of results.

A program computes one row, or a slice of a sum of two rows, from that row only.
"""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOptionalOperand=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table
from blockyard_kernels.cuda.quantized import SMALLEST_MAGNITUDE, Format, Quantized, quantize_leaf

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit
def inverse_root_mean_square(squares, count, epsilon):
    """Returns `1 / sqrt(squares / count + epsilon)`. `squares` is a sum of `count` squares; both are floats."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, count) + epsilon))


@triton.jit
def weigh(normed, weight, like):
    """Applies a weight and rounds to the dtype of `like`: before a weight in that dtype, after a float32 weight."""
    if weight.dtype == tl.float32:
        return (normed * weight).to(like.dtype)
    # A product of two values of 16 bits is exact in float32.
    return (normed.to(like.dtype).to(tl.float32) * weight.to(tl.float32)).to(like.dtype)


@triton.jit
def _added(numbers, residual, factor):
    """Adds in float32, and rounds once. A factor of None is 1."""
    wide = numbers.to(tl.float32)
    if factor is not None:
        wide = wide * factor
    return (wide + residual.to(tl.float32)).to(numbers.dtype)


@triton.jit
def _normed(numbers, weight, bias, columns, inside, count, epsilon, CENTRED: tl.constexpr):
    wide = numbers.to(tl.float32)
    if CENTRED:
        wide = tl.where(inside, wide - tl.div_rn(tl.sum(wide, 0), count), 0.0)
    scaled = wide * inverse_root_mean_square(tl.sum(wide * wide, 0), count, epsilon)
    if bias is not None:
        if weight is not None:
            scaled = scaled * tl.load(weight + columns, inside, 0)
        return (scaled + tl.load(bias + columns, inside, 0)).to(numbers.dtype)
    if weight is not None:
        return weigh(scaled, tl.load(weight + columns, inside, 0), numbers)
    return scaled.to(numbers.dtype)


@triton.jit
def _norm(
    hidden, residual, weight, bias, normed, total, values, scales, width, count, epsilon, factor,
    HAS_RESIDUAL: tl.constexpr, CENTRED: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(hidden + row + columns, inside, 0)
    if HAS_RESIDUAL:
        numbers = _added(numbers, tl.load(residual + row + columns, inside, 0), factor)
        tl.store(total + row + columns, numbers, inside)
    result = _normed(numbers, weight, bias, columns, inside, count, epsilon, CENTRED)
    tl.store(normed + row + columns, result, inside)
    if LARGEST > 0:
        scale = scales + tl.program_id(0)
        quantize_leaf(result.to(tl.float32), values + row + columns, scale, LARGEST, SMALLEST, inside)


def norm(
    hidden: Tensor,
    weight: Tensor | None,
    epsilon: float,
    residual: Tensor | None = None,
    scale: float = 1.0,
    into: Format | None = None,
    *,
    bias: Tensor | None = None,
    is_centred: bool = False,
) -> tuple[Tensor, Tensor, Quantized | None]:
    """See `blockyard_kernels.ops.Backend.rms_norm`, and `Backend.layer_norm` for `is_centred`.

    With a format `into` it also quantizes the result, in the same pass.
    """
    num_rows, width = hidden.shape
    normed = hidden.new_empty(num_rows, width)
    total = hidden if residual is None else hidden.new_empty(num_rows, width)
    made = None if into is None else Quantized.empty(normed, into)
    if num_rows:
        columns = (hidden, hidden if residual is None else residual, weight, bias, normed, total)
        levels = (hidden, hidden) if made is None else (made.values, made.scales)
        _norm[(num_rows,)](
            *columns, *levels, width, float(width), epsilon, _factor(scale), residual is not None, is_centred,
            0.0 if into is None else float(into.largest), SMALLEST_MAGNITUDE, **launch_table.norm_launch(width).options,
        )  # fmt: skip
    return normed, total, made


@triton.jit
def _add_normed(
    hidden, residual, weight, total, hidden_stride, width, count, epsilon, factor,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(hidden + row * hidden_stride + columns, inside, 0)
    result = _normed(numbers, weight, None, columns, inside, count, epsilon, False)
    if HAS_RESIDUAL:
        result = _added(result, tl.load(residual + row * width + columns, inside, 0), factor)
        tl.store(total + row * width + columns, result, inside)
    else:
        tl.store(hidden + row * hidden_stride + columns, result, inside)


def add_normed(hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor, scale: float = 1.0) -> Tensor:
    """See `blockyard_kernels.ops.Backend.add_normed`."""
    total = hidden.new_empty(*hidden.shape)
    _launch_add_normed(hidden, weight, epsilon, residual, total, scale)
    return total


def norm_in_place(rows: Tensor, weight: Tensor, epsilon: float) -> None:
    """Replaces rows [T, width], of any row stride, by the result of `blockyard_kernels.ops.Backend.rms_norm`."""
    _launch_add_normed(rows, weight, epsilon, None, rows, 1.0)


def _launch_add_normed(
    hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None, total: Tensor, scale: float
) -> None:
    num_rows, width = hidden.shape
    if num_rows:
        _add_normed[(num_rows,)](
            hidden, hidden if residual is None else residual, weight, total, hidden.stride(0), width, float(width),
            epsilon, _factor(scale), residual is not None, **launch_table.norm_launch(width).options,
        )  # fmt: skip


@triton.jit
def _add(hidden, residual, total, width, factor, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * width + columns
    inside = columns < width
    numbers, added = tl.load(hidden + place, inside, 0), tl.load(residual + place, inside, 0)
    tl.store(total + place, _added(numbers, added, factor), inside)


def add(hidden: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
    """See `blockyard_kernels.ops.Backend.add`."""
    num_rows, width = hidden.shape
    total = hidden.new_empty(num_rows, width)
    launch = launch_table.ACTIVATION
    if num_rows:
        grid = (num_rows, triton.cdiv(width, launch.block))
        _add[grid](hidden, residual, total, width, _factor(scale), **launch.options)
    return total


def _factor(scale: float) -> float | None:
    return None if scale == 1.0 else float(scale)
