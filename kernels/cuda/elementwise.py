"""The ops without a matrix product, in Triton. See `kernels.ops`.

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
from kernels.cuda.quantized import SMALLEST_MAGNITUDE, Quantized, quantize_leaf

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.cuda.quantized import Format
    from kernels.lora import VirtualRows
    from kernels.ops import AttentionBatch
    from kernels.shapes import AttentionShape, QueryKeyNorms


@triton.jit
def _inverse_root_mean_square(squares, count, epsilon):
    """Takes the sum of squares and how many there are, as a float."""
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, count) + epsilon))


@triton.jit
def _rms_norm(
    hidden, residual, weight, normed, total, values, scales, width, count, epsilon,
    HAS_RESIDUAL: tl.constexpr, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    numbers = tl.load(hidden + row + columns, inside, 0)
    if HAS_RESIDUAL:
        added = tl.load(residual + row + columns, inside, 0)
        numbers = (numbers.to(tl.float32) + added.to(tl.float32)).to(numbers.dtype)
        tl.store(total + row + columns, numbers, inside)
    wide = numbers.to(tl.float32)
    scaled = (wide * _inverse_root_mean_square(tl.sum(wide * wide, 0), count, epsilon)).to(numbers.dtype)
    # A product of two values of 16 bits is exact in float32.
    result = (scaled.to(tl.float32) * tl.load(weight + columns, inside, 0).to(tl.float32)).to(numbers.dtype)
    tl.store(normed + row + columns, result, inside)
    if LARGEST > 0:
        scale = scales + tl.program_id(0)
        quantize_leaf(result.to(tl.float32), values + row + columns, scale, LARGEST, SMALLEST, inside)


def rms_norm(
    hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None, into: Format | None = None
) -> tuple[Tensor, Tensor, Quantized | None]:
    """See `kernels.ops.Backend.rms_norm`. Quantizes the result too, in the same pass, if there is a format for it."""
    num_rows, width = hidden.shape
    normed = hidden.new_empty(num_rows, width)
    total = hidden if residual is None else hidden.new_empty(num_rows, width)
    made = None if into is None else Quantized.empty(normed, into)
    if num_rows:
        columns = (hidden, hidden if residual is None else residual, weight, normed, total)
        levels = (hidden, hidden) if made is None else (made.values, made.scales)
        _rms_norm[(num_rows,)](
            *columns, *levels, width, float(width), epsilon, residual is not None,
            0.0 if into is None else float(into.largest), SMALLEST_MAGNITUDE, **launch_table.norm_launch(width).options,
        )  # fmt: skip
    return normed, total, made


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
    indices, table, virtual, result, first_row, num_rows, width, first_virtual: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(indices + token).to(tl.int64)
    row = index - first_row
    is_here = (row >= 0) & (row < num_rows)
    found = tl.load(table + row * width + columns, is_here & (columns < width), 0)
    if first_virtual is not None:
        is_virtual = index >= first_virtual
        place = (index - first_virtual) * width + columns
        found = tl.where(is_virtual, tl.load(virtual + place, is_virtual & (columns < width), 0), found)
    tl.store(result + token * width + columns, found, columns < width)


def embedding(indices: Tensor, table: Tensor, first_row: int = 0, virtual: VirtualRows | None = None) -> Tensor:
    """Takes rows [T] int64 of a table [N, width] that starts at `first_row` of a larger one -> [T, width].

    Rows that neither it nor `virtual` has are zeros.
    """
    num_rows, width = table.shape
    result = table.new_empty(len(indices), width)
    launch = launch_table.EMBEDDING
    rows, first_id = (None, None) if virtual is None else (virtual.rows, virtual.first_id)
    if result.numel():
        grid = (len(indices), triton.cdiv(width, launch.block))
        _embedding[grid](indices, table, rows, result, first_row, num_rows, width, first_id, **launch.options)
    return result


@triton.jit
def slot_offset(slot, block_stride, block_size, head_dim):
    """Returns where a slot (int64) of a pool's first layer and head lies, in elements, int64."""
    return slot // block_size * block_stride + slot % block_size * head_dim


@triton.jit
def _turned(values, other, cosines, sines):
    """Rounds both products and their sum, as the reference does."""
    dtype = values.dtype
    straight = (values.to(tl.float32) * cosines.to(tl.float32)).to(dtype)
    crossed = (other.to(tl.float32) * sines.to(tl.float32)).to(dtype)
    return (straight.to(tl.float32) + crossed.to(tl.float32)).to(dtype)


@triton.jit
def _num_slots_to_clear(slots, token, num_tokens, block_size):
    """Counts the slots behind a token's that are to be cleared.

    Those of the last token in its block, if the block's first slot is written in this step too. A block's tokens are
    one sequence's, so neighbouring slots in it are those of neighbouring rows.
    """
    slot = tl.load(slots + token)
    offset = slot % block_size
    next_slot = tl.load(slots + token + 1, token + 1 < num_tokens, -1)
    is_fresh = tl.load(slots + token - offset, token >= offset, -1) == slot - offset
    return tl.where((next_slot != slot + 1) & is_fresh, block_size - 1 - offset, 0)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotary_and_cache(
    qkv, rotary, slots, pool, query, query_norm, key_norm, count, epsilon, num_tokens, block_stride, layer_offset,
    block_size, num_heads, num_kv_heads, head_dim, HAS_NORMS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    half = head_dim // 2
    is_query, is_rotated = head < num_heads, head < num_heads + num_kv_heads
    inside = (head < num_heads + 2 * num_kv_heads) & (column < half)
    source = qkv + (token * (num_heads + 2 * num_kv_heads) + head) * head_dim + column
    first, second = tl.load(source, inside, 0), tl.load(source + half, inside, 0)
    dtype = first.dtype
    plain_first, plain_second = first, second
    if HAS_NORMS:
        wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 1)
        scale = _inverse_root_mean_square(squares, count, epsilon)[:, None]
        # Of the other kinds of heads nothing is read.
        at_query, at_key = inside & is_query, inside & is_rotated & (head >= num_heads)
        weight = tl.load(query_norm + column, at_query, 0) + tl.load(key_norm + column, at_key, 0)
        first = ((wide_first * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
        weight = tl.load(query_norm + half + column, at_query, 0) + tl.load(key_norm + half + column, at_key, 0)
        second = ((wide_second * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
    angles = rotary + token * 2 * head_dim + column
    in_half = column < half
    cosines, sines = tl.load(angles, in_half, 0), tl.load(angles + head_dim, in_half, 0)
    turned_first = tl.where(is_rotated, _turned(first, second, cosines, sines), plain_first)
    cosines, sines = tl.load(angles + half, in_half, 0), tl.load(angles + head_dim + half, in_half, 0)
    turned_second = tl.where(is_rotated, _turned(second, first, cosines, sines), plain_second)

    to_query = query + (token * num_heads + head) * head_dim + column
    tl.store(to_query, turned_first, inside & is_query)
    tl.store(to_query + half, turned_second, inside & is_query)
    # Keys of all heads, then values: the order of the pool's planes is that of the row.
    to_pool = inside & (head >= num_heads)
    place = slot_offset(tl.load(slots + token), block_stride, block_size, head_dim) + layer_offset
    slot = pool + place + (head - num_heads).to(tl.int64) * block_size * head_dim + column
    tl.store(slot, turned_first, to_pool)
    tl.store(slot + half, turned_second, to_pool)
    zeros = tl.zeros([HEADS, BLOCK], dtype)
    for behind in range(1, _num_slots_to_clear(slots, token, num_tokens, block_size) + 1):
        tl.store(slot + behind * head_dim, zeros, to_pool)
        tl.store(slot + behind * head_dim + half, zeros, to_pool)


def rotary_and_cache(
    qkv: Tensor,
    rotary: Tensor,
    batch: AttentionBatch,
    kv_pool: Tensor,
    layer: int,
    shape: AttentionShape,
    norms: QueryKeyNorms | None,
) -> Tensor:
    """See `kernels.ops.Backend.rotary_and_cache`. Leaves `qkv` as it was; the queries returned are a tensor apart.

    Reads `slot_mapping` alone of the batch: which blocks are fresh follows from it, and no size depends on that.
    """
    num_tokens, num_heads, num_kv_heads, head_dim = len(qkv), shape.num_heads, shape.num_kv_heads, shape.head_dim
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    query_norm, key_norm, epsilon = norms[:3] if norms else (qkv, qkv, 0.0)
    launch = launch_table.rotary_launch(head_dim)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, launch.heads))
        _rotary_and_cache[grid](
            qkv, rotary, batch.slot_mapping, kv_pool, query, query_norm, key_norm, float(head_dim), epsilon,
            num_tokens, kv_pool.stride(0), layer * kv_pool.stride(1), batch.block_size, num_heads, num_kv_heads,
            head_dim, norms is not None, **launch.options,
        )  # fmt: skip
    return query
