"""Activations and rows of tables, in Triton. See `kernels.ops`; what is said here holds for `kernels.cuda.rows` too.

A program computes one row, or a slice of one, from that row alone: tiles depend on the row's width and constants, so
that the company of a row cannot change its bits. Each rounding to the dtype stands where the reference has it, and
products are not fused into sums: results are the reference's bits but for two things, which change the last place of a
value in float32 before it is rounded: the order of the sum of squares, and the exponential.
"""
# Triton's functions are in a language of their own, of which pyright sees the syntax, and calls take more and other
# arguments than their parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda import launch_table

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.lora import VirtualRows


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
    """See `kernels.ops.Backend.silu_and_mul`."""
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
    """Takes rows [T] int64 of a table [N, width] that starts at `first_row` of a larger one, times the scale.

    Rows that neither it nor `virtual` has are zeros.

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
