"""Activations and embedding lookups, in Triton. See `blockyard_kernels.ops`. The text below also holds for `cuda.rows`.

A program computes one row, or a slice of a row, from that row only. Tile sizes depend only on the row's width and on
constants, so that other rows cannot change a row's bits. Values are rounded to the dtype where the reference rounds
them, and products are not fused into sums. Results differ from the reference only in the last float32 digit before
rounding, for two reasons: the order of the sum of squares, and the exponential function.
"""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.lora import VirtualRows


@triton.jit
def _silu_and_mul(gate_up, result, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, inside, 0)
    up = tl.load(gate_up + row * 2 * width + width + columns, inside, 0)
    wide = gate.to(tl.float32)
    active = tl.div_rn(wide, tl.exp(-wide) + 1).to(gate.dtype)
    tl.store(result + row * width + columns, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `blockyard_kernels.ops.Backend.silu_and_mul`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(num_rows, width)
    launch = launch_table.ACTIVATION
    if result.numel():
        _silu_and_mul[(num_rows, triton.cdiv(width, launch.block))](gate_up, result, width, **launch.options)
    return result


@triton.jit(do_not_specialize=["num_rows"])
def _embedding(
    indices, table, virtual, result, first_row, num_rows, width, scale, first_virtual: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + token).to(tl.int64)
    row = index - first_row
    is_here = (row >= 0) & (row < num_rows)
    found = tl.load(table + row * width + columns, is_here & (columns < width), 0)
    if scale is not None:
        found = (found.to(tl.float32) * scale).to(found.dtype)
    if first_virtual is not None:
        is_virtual = index >= first_virtual
        place = (index - first_virtual) * width + columns
        found = tl.where(is_virtual, tl.load(virtual + place, is_virtual & (columns < width), 0), found)
    tl.store(result + token * width + columns, found, columns < width)


def embedding(
    indices: Tensor, table: Tensor, first_row: int = 0, scale: float = 1.0, virtual: VirtualRows | None = None
) -> Tensor:
    """Looks up rows [T] int64 of a table [N, width], which starts at `first_row` of a larger table, times `scale`.

    Rows that are neither in the table nor in `virtual` are zeros.

    Returns:
        [T, width].
    """
    num_rows, width = table.shape
    result = table.new_empty(len(indices), width)
    launch = launch_table.EMBEDDING
    rows, first_id = (None, None) if virtual is None else (virtual.rows, virtual.first_id)
    if result.numel():
        grid = (len(indices), triton.cdiv(width, launch.block))
        factor = None if scale == 1.0 else float(scale)
        _embedding[grid](indices, table, rows, result, first_row, num_rows, width, factor, first_id, **launch.options)
    return result
