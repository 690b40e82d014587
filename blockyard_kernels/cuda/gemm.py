"""Products of rows and a weight, summed in the same order for any number of rows.

Each leaf of the inner dimension is summed in steps of BLOCK_K, which depends only on the leaf's length, and the leaves
are added as a tree (`add_leaves`). One program computes an output completely. The size of tiles depends on the
number of rows. That does not change the order of summation, but it may change the instructions and so the bits; the
probe tests this (`blockyard_kernels.cuda.linear`). Knows nothing of linear layers.
"""
# Triton functions are not plain Python: pyright understands only their syntax.
# pyright: basic, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table
from blockyard_kernels.cuda.epilogue import PLAIN, Epilogue, activate, transform

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.cuda.launch_table import GemmLaunch

# Neighbouring tiles of rows that are computed together, while their part of the weight is in the cache.
GROUP_TILES = 8
# The number used when Triton interprets the kernels on a CPU: it gives fewer programs than tiles.
INTERPRETED_MULTIPROCESSORS = 3


@triton.jit
def _find_tile(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    first = tile // (GROUP * tiles_n) * GROUP
    size = min(tiles_m - first, GROUP)
    place = tile % (GROUP * tiles_n)
    return first + place % size, place // size


@triton.jit
def _sum_leaf(
    left,
    right,
    is_row,
    is_column,
    first,
    FEATURES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    SUM: tl.constexpr = tl.int32 if left.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((BLOCK_M, BLOCK_N), SUM)
    for step in range(0, FEATURES, BLOCK_K):
        k = step + tl.arange(0, BLOCK_K)
        in_leaf = k < FEATURES
        a = tl.load(left + (first + k)[None, :], mask=is_row[:, None] & in_leaf[None, :], other=0.0)
        b = tl.load(right + (first + k)[:, None], mask=is_column[None, :] & in_leaf[:, None], other=0.0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee", out_dtype=SUM)
    return total.to(tl.float32)


@triton.jit
def sum_leaves(
    left,
    right,
    row_scales,
    scales,
    m,
    n,
    is_row,
    is_column,
    LEAF_FEATURES: tl.constexpr,
    LEAVES: tl.constexpr,
    ROWS_SCALED: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Sums a tile [BLOCK_M, BLOCK_N] in float32, leaf by leaf.

    `left` [BLOCK_M, 1] and `right` [1, BLOCK_N] point to the first features of the rows and columns.
    """
    # Sums of one, two and four leaves that wait for the sum of their neighbours.
    one = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    two, four, total = one, one, one
    for leaf in range(LEAVES):
        total = _sum_leaf(
            left, right, is_row, is_column, leaf * LEAF_FEATURES, LEAF_FEATURES, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if ROWS_SCALED:
            total = total * tl.load(row_scales + m * LEAVES + leaf, mask=is_row, other=0.0)[:, None]
        if SCALED:
            total = total * tl.load(scales + n * LEAVES + leaf, mask=is_column, other=0.0)[None, :]
        # After every second, fourth and eighth leaf the sum of two, four and eight leaves is complete.
        if LEAVES >= 2:
            one, total = total, one + total
        if LEAVES >= 4:
            two, total = tl.where(leaf % 2 == 1, total, two), two + total
        if LEAVES >= 8:
            four, total = tl.where(leaf % 4 == 3, total, four), four + total
    return total


# Without this Triton would compile again for num_rows of 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    rows,
    weight,
    row_scales,
    scales,
    bias,
    result,
    num_rows,
    num_columns,
    row_stride,
    weight_stride,
    LEAF_FEATURES: tl.constexpr,
    LEAVES: tl.constexpr,
    ROWS_SCALED: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(num_columns, BLOCK_N)
    num_outputs = num_columns // 2 if GATED else num_columns
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _find_tile(tile, tiles_m, tiles_n, GROUP)
        m, column = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = m < num_rows, column < num_columns
        # A tile has gates and ups in alternating columns, although the weight has all gates first.
        n = column % 2 * (num_columns // 2) + column // 2 if GATED else column
        left = rows + m.to(tl.int64)[:, None] * row_stride
        right = weight + n.to(tl.int64)[None, :] * weight_stride

        total = sum_leaves(
            left, right, row_scales, scales, m, n, is_row, is_column,
            LEAF_FEATURES, LEAVES, ROWS_SCALED, SCALED, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            total += tl.load(bias + n, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(total.reshape(BLOCK_M, BLOCK_N // 2, 2))
            total = activate(gate, ACTIVATION) * up
            column = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        else:
            total = transform(activate(total, ACTIVATION), SCALE, SOFTCAP)
        target = result + m.to(tl.int64)[:, None] * num_outputs + column[None, :]
        tl.store(target, total.to(result.dtype.element_ty), mask=is_row[:, None] & (column < num_outputs)[None, :])


def multiply(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    leaves: int = 1,
    epilogue: Epilogue = PLAIN,
    dtype: torch.dtype | None = None,
    scales: tuple[Tensor | None, Tensor] | None = None,
    uniform: bool = False,
) -> Tensor:
    """Multiplies rows by a weight, sums in float32, and rounds once: each output is a function of its row alone.

    Args:
        rows: [M, K], of any row stride, in float32, float16, bfloat16 or int8.
        weight: [N, K], of any row stride, in the rows' dtype; or in float8_e4m3fn, which is converted to the rows'
            dtype. Sums of int8 are exact.
        bias: [N], added in float32 after the leaves.
        leaves: number of slices of K that are summed separately, a power of two, at most 8.
        epilogue: the operations after the bias.
        dtype: the dtype of the result; by default the rows' dtype.
        scales: the scales of 8-bit values, float32, contiguous: of the rows [M, leaves], or None if the rows are not
            quantized, and of the weight [N, leaves]. A leaf's sum is multiplied by the row's scale, then by the
            weight's.
        uniform: whether few rows use the warp-group instructions of many rows, so that all row counts use the same.

    Returns:
        [M, N], or [M, N / 2] if gated.
    """
    num_rows, in_features = rows.shape
    num_columns = len(weight)
    result = rows.new_empty(num_rows, num_columns // 2 if epilogue.gated else num_columns, dtype=dtype or rows.dtype)
    if num_rows == 0:
        return result
    least_rows = launch_table.WARP_GROUP_ROWS if uniform else 0
    is_plain = leaves == 1 and rows.dtype is weight.dtype
    launch = launch_table.gemm_launch(rows.itemsize, is_plain, max(num_rows, least_rows))
    row_scales, weight_scales = scales or (None, None)
    operands = (rows, weight, *(rows if each is None else each for each in (row_scales, weight_scales, bias)), result)
    _multiply[_grid(launch, num_rows, num_columns, rows.device)](
        *operands, num_rows, num_columns, rows.stride(0), weight.stride(0),
        LEAF_FEATURES=in_features // leaves,
        LEAVES=leaves,
        ROWS_SCALED=row_scales is not None,
        SCALED=weight_scales is not None,
        HAS_BIAS=bias is not None,
        **epilogue.options,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch_table.gemm_block_k(rows.itemsize, in_features // leaves),
        GROUP=GROUP_TILES,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        # A rank with one leaf scales the sum before it is added; a rank with several leaves must do the same.
        enable_fp_fusion=scales is None,
    )  # fmt: skip
    return result


def _grid(launch: GemmLaunch, num_rows: int, num_columns: int, device: torch.device) -> tuple[int]:
    num_tiles = -(-num_rows // launch.block_m) * -(-num_columns // launch.block_n)
    return (min(num_tiles, num_multiprocessors(device) * launch.programs_per_multiprocessor),)


@cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
