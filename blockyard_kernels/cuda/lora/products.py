"""The products of rows with the two factors of their LoRA adapters: see `blockyard_kernels.lora`.

A program multiplies at most TILE_ROWS rows of one slot, which it finds by `Segments.bounds` on the device. The inner
dimension is summed in steps that depend only on its length, and leaves are added as a tree (`add_leaves`). One
program computes a sum completely, and all tiles have one size, so that a row's bits depend only on that row and its
adapter. Rows without an adapter are neither read nor written.
"""
# Triton functions are not plain Python: pyright understands only their syntax.
# pyright: basic, reportAssignmentType=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table
from blockyard_kernels.cuda.epilogue import Epilogue, activate
from blockyard_kernels.cuda.gemm import sum_leaves
from blockyard_kernels.cuda.lora.segments import TILE_ROWS, Segments

if TYPE_CHECKING:
    from torch import Tensor


WIDTH_MULTIPLE = 16
"""Widths of adapters are padded to a multiple of this, so that rows are aligned for reads of 16 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The adapters of a weight, as views of its slots."""

    widths: Tensor
    """[slots] int32: the padded width of each adapter, a multiple of WIDTH_MULTIPLE; 0: the slot is empty."""
    numbers: Tensor
    """[slots, most]: the factors of each slot: `shrink` [width, in_features], then `expand` [rows, width]."""
    max_width: int
    """The padded width of the widest adapter."""


@triton.jit
def _find_tile(tile, bounds, num_slots, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns a tile's slot (num_slots or more: no slot), the place of its first row in `order`, and the slot's end."""
    slots = tl.arange(0, SLOTS)
    begins = tl.load(bounds + slots, slots < num_slots, 0)
    ends = tl.load(bounds + slots + 1, slots < num_slots, 0)
    tiles = tl.cdiv(ends - begins, BLOCK_M)
    slot = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    is_before, is_here = slots < slot, slots == slot
    first = tl.sum(tl.where(is_here, begins, 0)) + (tile - tl.sum(tl.where(is_before, tiles, 0))) * BLOCK_M
    return slot, first, tl.sum(tl.where(is_here, ends, 0))


@triton.jit
def _shrink(
    rows,
    widths,
    numbers,
    order,
    bounds,
    inner,
    num_slots,
    row_stride,
    width_stride,
    slot_stride,
    inner_stride,
    LEAF_FEATURES: tl.constexpr,
    LEAVES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    slot, first, end = _find_tile(tl.program_id(0), bounds, num_slots, SLOTS, BLOCK_M)
    if slot < num_slots:
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        width = tl.load(widths + slot.to(tl.int64) * width_stride)
        if tl.program_id(1) * BLOCK_N < width:
            place = first + tl.arange(0, BLOCK_M)
            is_row, is_column = place < end, n < width
            m = tl.load(order + place, is_row, 0)
            left = rows + m.to(tl.int64)[:, None] * row_stride
            right = numbers + slot.to(tl.int64) * slot_stride + n.to(tl.int64)[None, :] * (LEAF_FEATURES * LEAVES)
            total = sum_leaves(
                left, right, rows, rows, m, n, is_row, is_column,
                LEAF_FEATURES, LEAVES, False, False, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            target = inner + m.to(tl.int64)[:, None] * inner_stride + n[None, :]
            tl.store(target, total, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _sum_inner(
    left, right, is_row, is_column, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(0, width, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        b = tl.load(right + k[:, None], mask=is_column[None, :] & (k < width)[:, None], other=0.0)
        a = tl.load(left + k[None, :], mask=is_row[:, None] & (k < width)[None, :], other=0.0).to(b.dtype)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=tl.float32)
    return total


@triton.jit
def _load_biased(sums, bias, n, is_element, is_column, HAS_BIAS: tl.constexpr):
    value = tl.load(sums + n[None, :], mask=is_element, other=0.0).to(tl.float32)
    if HAS_BIAS:
        value += tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit
def _expand(
    sums,
    bias,
    inner,
    widths,
    numbers,
    order,
    bounds,
    result,
    num_slots,
    in_features,
    num_columns,
    num_outputs,
    width_stride,
    slot_stride,
    inner_stride,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    slot, first, end = _find_tile(tl.program_id(0), bounds, num_slots, SLOTS, BLOCK_M)
    if slot < num_slots:
        width = tl.load(widths + slot.to(tl.int64) * width_stride)
        if width > 0:
            width = tl.multiple_of(width, 16)
            place = first + tl.arange(0, BLOCK_M)
            n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
            is_row, is_column = place < end, n < num_outputs
            is_element = is_row[:, None] & is_column[None, :]
            m = tl.load(order + place, is_row, 0).to(tl.int64)[:, None]
            left, there = inner + m * inner_stride, sums + m * num_columns
            factor = numbers + slot.to(tl.int64) * slot_stride + width.to(tl.int64) * in_features
            right = factor + n.to(tl.int64)[None, :] * width
            value = _load_biased(there, bias, n, is_element, is_column, HAS_BIAS)
            value += _sum_inner(left, right, is_row, is_column, width, BLOCK_M, BLOCK_N, BLOCK_K)
            if GATED:
                up = _load_biased(there, bias, n + num_outputs, is_element, is_column, HAS_BIAS)
                right += num_outputs.to(tl.int64) * width
                up += _sum_inner(left, right, is_row, is_column, width, BLOCK_M, BLOCK_N, BLOCK_K)
                value = activate(value, ACTIVATION) * up
            else:
                value = activate(value, ACTIVATION)
            tl.store(result + m * num_outputs + n[None, :], value.to(result.dtype.element_ty), mask=is_element)


def shrink(rows: Tensor, factors: Factors, segments: Segments, leaves: int) -> Tensor:
    """Multiplies rows by the `shrink` factors of their adapters.

    Args:
        rows: [R, in_features], of any row stride, in the factors' dtype.
        factors: the factors of all slots.
        segments: the rows by slot.
        leaves: number of slices of in_features that are summed separately.

    Returns:
        [R, max_width] float32, not rounded. Rows without an adapter, and columns past an adapter's width, are
        uninitialised.
    """
    inner = rows.new_empty(len(rows), factors.max_width, dtype=torch.float32)
    launch = launch_table.shrink_launch(rows.itemsize, rows.shape[1] // leaves)
    if segments.num_tiles:
        _shrink[(segments.num_tiles, -(-factors.max_width // launch.block_n))](
            rows, factors.widths, factors.numbers, segments.order, segments.bounds, inner,
            len(factors.widths), rows.stride(0), factors.widths.stride(0), factors.numbers.stride(0), inner.stride(0),
            LEAF_FEATURES=rows.shape[1] // leaves,
            LEAVES=leaves,
            SLOTS=triton.next_power_of_2(len(factors.widths)),
            BLOCK_M=TILE_ROWS,
            **launch.options,
        )  # fmt: skip
    return inner


def expand(
    sums: Tensor,
    bias: Tensor | None,
    inner: Tensor,
    factors: Factors,
    segments: Segments,
    result: Tensor,
    in_features: int,
    epilogue: Epilogue,
) -> None:
    """Writes the rows that have adapters: sums plus bias plus `expand` products, then the epilogue, then rounds.

    Args:
        sums: [R, N], contiguous; may be `result` itself.
        bias: [N].
        inner: [R, max_width] float32, of any row stride: the results of `shrink`, summed over all ranks.
        factors: the factors of all slots.
        segments: the rows by slot.
        result: [R, N], or [R, N / 2] if gated, contiguous. Rows without an adapter stay as they are.
        in_features: the inner dimension of the `shrink` factors.
        epilogue: the operations after the bias; its logit transform is ignored.
    """
    num_columns, num_outputs = sums.shape[1], result.shape[1]
    launch = launch_table.LORA_EXPAND[factors.numbers.itemsize]
    if segments.num_tiles:
        _expand[(segments.num_tiles, -(-num_outputs // launch.block_n))](
            sums, sums if bias is None else bias, inner, factors.widths, factors.numbers, segments.order,
            segments.bounds, result, len(factors.widths), in_features, num_columns, num_outputs,
            factors.widths.stride(0), factors.numbers.stride(0), inner.stride(0),
            HAS_BIAS=bias is not None,
            GATED=epilogue.gated,
            ACTIVATION=epilogue.options["ACTIVATION"],
            SLOTS=triton.next_power_of_2(len(factors.widths)),
            BLOCK_M=TILE_ROWS,
            **launch.options,
        )  # fmt: skip
