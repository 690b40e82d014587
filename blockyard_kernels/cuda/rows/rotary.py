"""Rotation of queries and keys, and writing keys and values to their slots, in one kernel. See `blockyard_kernels.ops`.

A program computes some heads of one token from these heads only; norms of whole rows are a separate launch before it.
For the bits of results see `blockyard_kernels.cuda.elementwise`.
"""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportOptionalOperand=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table
from blockyard_kernels.cuda.rows.norms import inverse_root_mean_square, norm_in_place, weigh

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.ops import AttentionBatch
    from blockyard_kernels.shapes import AttentionShape, QueryKeyNorms


@triton.jit
def slot_offset(slot, block_stride, block_size, head_dim):
    """Returns the offset of a slot (int64) in the pool's first layer and head, in elements, int64."""
    return slot // block_size * block_stride + slot % block_size * head_dim


@triton.jit
def _turned(values, other, cosines, sines):
    """Rotates values. Both products and their sum are rounded, as in the reference."""
    dtype = values.dtype
    straight = (values.to(tl.float32) * cosines.to(tl.float32)).to(dtype)
    crossed = (other.to(tl.float32) * sines.to(tl.float32)).to(dtype)
    return (straight.to(tl.float32) + crossed.to(tl.float32)).to(dtype)


@triton.jit
def _num_slots_to_clear(slots, token, num_tokens, block_size):
    """Counts the slots after a token's slot that must be cleared.

    The last token of this step in a block clears the rest of the block if the block's first slot is also written in
    this step. A block's tokens belong to one sequence, so neighbouring slots belong to neighbouring rows.
    """
    slot = tl.load(slots + token)
    offset = slot % block_size
    next_slot = tl.load(slots + token + 1, token + 1 < num_tokens, -1)
    is_fresh = tl.load(slots + token - offset, token >= offset, -1) == slot - offset
    return tl.where((next_slot != slot + 1) & is_fresh, block_size - 1 - offset, 0)


@triton.jit
def _head_scales(first, second, rest, count, epsilon, REST: tl.constexpr):
    """Returns the inverse root mean square of each head."""
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 1)
    if REST:
        squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
    return inverse_root_mean_square(squares, count, epsilon)[:, None]


@triton.jit
def _weighed(values, scales, query_norm, key_norm, inside, is_query, is_key):
    """Applies scales and norm weights to query and key heads. Value heads read no weight."""
    weight = tl.load(query_norm, inside & is_query, 0) + tl.load(key_norm, inside & is_key, 0)
    return weigh(values.to(tl.float32) * scales, weight, values)


@triton.jit
def _turned_halves(first, second, angles, in_half, rotated, half):
    cosines, sines = tl.load(angles, in_half, 0), tl.load(angles + rotated, in_half, 0)
    turned = _turned(first, second, cosines, sines)
    cosines, sines = tl.load(angles + half, in_half, 0), tl.load(angles + rotated + half, in_half, 0)
    return turned, _turned(second, first, cosines, sines)


@triton.jit(do_not_specialize=["num_tokens"])
def _rotary_and_cache(
    qkv, rotary, slots, pool, query, query_norm, key_norm, count, epsilon, num_tokens, block_stride, layer_offset,
    block_size, num_heads, num_kv_heads, head_dim, HAS_NORMS: tl.constexpr, ROTATED: tl.constexpr, HEADS: tl.constexpr,
    REST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A head is read as the two halves of its first ROTATED numbers (0: the whole head) and a tile of REST others."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    rotated = ROTATED if ROTATED else head_dim
    half = rotated // 2
    is_query, is_rotated = head < num_heads, head < num_heads + num_kv_heads
    exists, is_key = head < num_heads + 2 * num_kv_heads, is_rotated & (head >= num_heads)
    inside = exists & (column < half)
    source = qkv + (token * (num_heads + 2 * num_kv_heads) + head) * head_dim
    first, second = tl.load(source + column, inside, 0), tl.load(source + column + half, inside, 0)
    # V is copied unchanged; only Q and K are normalized and rotated.
    plain_first, plain_second, rest = first, second, first
    if REST:
        behind = rotated + tl.arange(0, REST)[None, :]
        in_rest = exists & (behind < head_dim)
        rest = tl.load(source + behind, in_rest, 0)
    if HAS_NORMS:
        scales = _head_scales(first, second, rest, count, epsilon, REST)
        first = _weighed(first, scales, query_norm + column, key_norm + column, inside, is_query, is_key)
        to_query, to_key = query_norm + half + column, key_norm + half + column
        second = _weighed(second, scales, to_query, to_key, inside, is_query, is_key)
        if REST:
            normed = _weighed(rest, scales, query_norm + behind, key_norm + behind, in_rest, is_query, is_key)
            rest = tl.where(is_rotated, normed, rest)
    if rotary is not None:
        angles = rotary + token * 2 * rotated + column
        first, second = _turned_halves(first, second, angles, column < half, rotated, half)
    first, second = tl.where(is_rotated, first, plain_first), tl.where(is_rotated, second, plain_second)

    to_query = query + (token * num_heads + head) * head_dim
    tl.store(to_query + column, first, inside & is_query)
    tl.store(to_query + column + half, second, inside & is_query)
    # The row and the pool have the same order: keys of all heads, then values of all heads.
    to_pool = inside & (head >= num_heads)
    place = slot_offset(tl.load(slots + token), block_stride, block_size, head_dim) + layer_offset
    slot = pool + place + (head - num_heads).to(tl.int64) * block_size * head_dim
    tl.store(slot + column, first, to_pool)
    tl.store(slot + column + half, second, to_pool)
    if REST:
        tl.store(to_query + behind, rest, in_rest & is_query)
        tl.store(slot + behind, rest, in_rest & (head >= num_heads))
    for _ in range(_num_slots_to_clear(slots, token, num_tokens, block_size)):
        slot += head_dim
        tl.store(slot + column, tl.zeros_like(first), to_pool)
        tl.store(slot + column + half, tl.zeros_like(first), to_pool)
        if REST:
            tl.store(slot + behind, tl.zeros_like(rest), in_rest & (head >= num_heads))


def rotary_and_cache(
    qkv: Tensor,
    rotary: Tensor | None,
    batch: AttentionBatch,
    kv_pool: Tensor,
    layer: int,
    shape: AttentionShape,
    norms: QueryKeyNorms | None = None,
) -> Tensor:
    """See `blockyard_kernels.ops.Backend.rotary_and_cache`. The returned queries are a new tensor.

    Of the batch it reads only `slot_mapping`, from which the fresh blocks follow, so no size depends on `fresh_blocks`.
    """
    num_tokens, num_heads, num_kv_heads, head_dim = len(qkv), shape.num_heads, shape.num_kv_heads, shape.head_dim
    if norms is not None and norms.are_of_whole_rows:
        queries, keys, _ = qkv.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], 1)
        norm_in_place(queries, norms.query, norms.epsilon)
        norm_in_place(keys, norms.key, norms.epsilon)
        norms = None
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    query_norm, key_norm, epsilon = (norms.query, norms.key, norms.epsilon) if norms else (qkv, qkv, 0.0)
    rotated = head_dim if rotary is None else rotary.shape[2]
    launch = launch_table.rotary_launch(head_dim, rotated)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, launch.heads))
        _rotary_and_cache[grid](
            qkv, rotary, batch.slot_mapping, kv_pool, query, query_norm, key_norm, float(head_dim), epsilon,
            num_tokens, kv_pool.stride(0), layer * kv_pool.stride(1), batch.block_size, num_heads, num_kv_heads,
            head_dim, norms is not None, rotated if launch.rest else 0, **launch.options,
        )  # fmt: skip
    return query
