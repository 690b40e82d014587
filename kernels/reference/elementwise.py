"""The ops without a matrix product: each computes a row from that row alone, in one fixed order.

Only functions whose results do not depend on an element's place in the tensor are used: torch's own `silu`, `sigmoid`
and `gelu` take another formula for the last elements of a vector or a thread's share, so they are spelled out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.ops import AttentionBatch, AttentionShape

_SLOTS = "slots"


def normalise(rows: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm over the last dimension: in float32, rounded to the dtype, then times the weight."""
    wide = rows.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(rows.dtype) * weight


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """See `kernels.ops.Backend.rms_norm`."""
    total = hidden if residual is None else hidden + residual
    return normalise(total, weight, epsilon), total


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `kernels.ops.Backend.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / torch.exp(-wide).add_(1)).to(gate.dtype) * up


def rotary_and_cache(
    qkv: Tensor,
    rotary: Tensor,
    batch: AttentionBatch,
    kv_pool: Tensor,
    layer: int,
    shape: AttentionShape,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """See `kernels.ops.Backend.rotary_and_cache`. Works in place: the queries returned are a view of `qkv`."""
    num_queries, num_keys = shape.num_heads, shape.num_kv_heads
    heads = qkv.view(-1, num_queries + 2 * num_keys, shape.head_dim)
    query, key = heads[:, :num_queries], heads[:, num_queries : num_queries + num_keys]
    if norms is not None:
        query_weight, key_weight, epsilon = norms
        query.copy_(normalise(query, query_weight, epsilon))
        key.copy_(normalise(key, key_weight, epsilon))
    rotated = heads[:, : num_queries + num_keys]
    turned = torch.roll(rotated, shape.head_dim // 2, dims=-1).mul_(rotary[:, 1, None])
    torch.add(rotated * rotary[:, 0, None], turned, out=rotated)
    _write(heads[:, num_queries:], batch, kv_pool, layer)
    return query


def _write(keys_values: Tensor, batch: AttentionBatch, kv_pool: Tensor, layer: int) -> None:
    """Writes [T, 2K, D] to the layer's slots, and clears what a fresh block held before."""
    if batch.fresh_blocks.numel():
        kv_pool[:, layer].index_fill_(0, batch.fresh_blocks, 0)
    head_dim = kv_pool.shape[-1]
    rows: Tensor | None = batch.work_lists.get(_SLOTS)
    if rows is None:
        rows = batch.work_lists[_SLOTS] = _slot_rows(batch, kv_pool, keys_values.shape[1])
    layers = kv_pool.view(-1, head_dim)[layer * kv_pool.stride(1) // head_dim :]
    layers.index_copy_(0, rows, keys_values.reshape(-1, head_dim))


def _slot_rows(batch: AttentionBatch, kv_pool: Tensor, num_heads: int) -> Tensor:
    """[T * num_heads]: where keys and values of each token lie in layer 0, in rows of head_dim."""
    head_dim, block_size = kv_pool.shape[-1], batch.block_size
    block_ids, offsets = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    first_rows = block_ids * (kv_pool.stride(0) // head_dim) + offsets
    heads = torch.arange(num_heads, device=kv_pool.device) * block_size
    return (first_rows[:, None] + heads).flatten()
