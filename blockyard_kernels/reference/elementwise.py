"""The ops without a matrix product: each computes a row from that row alone, in one fixed order.

Only functions whose results do not depend on an element's place in the tensor are used. torch's own `silu`, `sigmoid`
and `gelu` use another formula for the last elements of a vector or of a thread's part, so they are written out here.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockyard_kernels.reference.int8 import quantize_heads
from blockyard_kernels.shapes import Activation, AttentionShape, LogitTransform, QueryKeyNorms

if TYPE_CHECKING:
    from blockyard_kernels.ops import AttentionBatch

_SLOTS = "slots"


def normalise(rows: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """RMS norm over the last dimension, in float32. A float32 weight multiplies before rounding, any other after it."""
    wide = rows.float()
    return _weigh(wide * _inverse_root(wide, epsilon), weight, rows.dtype)


def _inverse_root(wide: Tensor, epsilon: float) -> Tensor:
    return torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)


def _weigh(normed: Tensor, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    if weight is None:
        return normed.to(dtype)
    return (normed * weight).to(dtype) if weight.dtype is torch.float32 else normed.to(dtype) * weight


def add(hidden: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
    """See `blockyard_kernels.ops.Backend.add`."""
    if scale == 1.0:
        return hidden + residual
    return (hidden.float() * scale + residual.float()).to(hidden.dtype)


def rms_norm(
    hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None = None, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """See `blockyard_kernels.ops.Backend.rms_norm`."""
    total = hidden if residual is None else add(hidden, residual, scale)
    return normalise(total, weight, epsilon), total


def layer_norm(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    epsilon: float,
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `blockyard_kernels.ops.Backend.layer_norm`."""
    total = hidden if residual is None else add(hidden, residual, scale)
    wide = total.float()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred * _inverse_root(centred, epsilon)
    if weight is not None:
        normed = normed * weight
    if bias is not None:
        normed = normed + bias
    return normed.to(total.dtype), total


def activate(rows: Tensor, activation: Activation) -> Tensor:
    """Computes an activation, in float32, rounded to the dtype."""
    return _ACTIVATIONS[activation](rows.float()).to(rows.dtype)


def _silu(x: Tensor) -> Tensor:
    return x / torch.exp(-x).add_(1)


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * 0.5 * (1 + torch.tanh(inner))


def _gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


def _relu(x: Tensor) -> Tensor:
    return x.clamp_min(0)


def _relu2(x: Tensor) -> Tensor:
    positive = _relu(x)
    return positive * positive


_ACTIVATIONS = {
    Activation.SILU: _silu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.GELU_ERF: _gelu_erf,
    Activation.RELU: _relu,
    Activation.RELU2: _relu2,
    Activation.TANH: torch.tanh,
}


def activate_and_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Computes `activation(gate) * up` for rows [T, 2 * width], gate first -> [T, width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, activation) * up


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `blockyard_kernels.ops.Backend.silu_and_mul`."""
    return activate_and_mul(gate_up, Activation.SILU)


def transform_logits(sums: Tensor, transform: LogitTransform) -> Tensor:
    """See `blockyard_kernels.shapes.LogitTransform`; in float32."""
    if transform.scale != 1.0:
        sums = sums * transform.scale
    return cap(sums, transform.softcap) if transform.softcap else sums


def cap(values: Tensor, softcap: float) -> Tensor:
    """Computes `softcap * tanh(value / softcap)`."""
    return torch.tanh(values * (1 / softcap)).mul_(softcap)


def rotary_and_cache(
    qkv: Tensor,
    rotary: Tensor | None,
    batch: AttentionBatch,
    kv_pool: Tensor,
    layer: int,
    shape: AttentionShape,
    norms: QueryKeyNorms | None = None,
) -> Tensor:
    """See `blockyard_kernels.ops.Backend.rotary_and_cache`. In place: the queries returned are a view of `qkv`."""
    num_queries, num_keys = shape.num_heads, shape.num_kv_heads
    first_key = num_queries * (1 + shape.has_gates)
    heads = qkv.view(-1, first_key + 2 * num_keys, shape.head_dim)
    query, key = heads[:, :num_queries], heads[:, first_key : first_key + num_keys]
    if norms is not None and not norms.follow_rotation:
        _normalise_heads(query, key, norms)
    if rotary is not None:
        _rotate(query, rotary[:, -2:])
        _rotate(key, rotary[:, :2])
    if norms is not None and norms.follow_rotation:
        _normalise_heads(query, key, norms)
    _write(heads[:, first_key:], batch, kv_pool, layer)
    return query


def _normalise_heads(query: Tensor, key: Tensor, norms: QueryKeyNorms) -> None:
    for part, weight in ((query, norms.query), (key, norms.key)):
        rows = part.flatten(1) if norms.are_of_whole_rows else part
        part.copy_(normalise(rows, weight, norms.epsilon).view_as(part))


def _rotate(heads: Tensor, rotary: Tensor) -> None:
    """Rotates the first R numbers of heads [T, H, D] in place by [T, 2, R]."""
    rotated = heads[..., : rotary.shape[2]]
    turned = torch.roll(rotated, rotary.shape[2] // 2, dims=-1).mul_(rotary[:, 1, None])
    torch.add(rotated * rotary[:, 0, None], turned, out=rotated)


def _write(keys_values: Tensor, batch: AttentionBatch, kv_pool: Tensor, layer: int) -> None:
    """Writes [T, 2K, D] to the layer's slots, and clears what a fresh block held before."""
    if batch.fresh_blocks.numel():
        kv_pool[:, layer].index_fill_(0, batch.fresh_blocks, 0)
    if kv_pool.dtype == torch.int8:
        keys_values = quantize_heads(keys_values)
    width = kv_pool.shape[-1]
    rows: Tensor | None = batch.work_lists.get(_SLOTS)
    if rows is None:
        rows = batch.work_lists[_SLOTS] = _slot_rows(batch, kv_pool, keys_values.shape[1])
    layers = kv_pool.view(-1, width)[layer * kv_pool.stride(1) // width :]
    layers.index_copy_(0, rows, keys_values.reshape(-1, width))


def _slot_rows(batch: AttentionBatch, kv_pool: Tensor, num_heads: int) -> Tensor:
    """Returns [T * num_heads]: the pool rows of each token's keys and values in layer 0; a row is one head's."""
    width, block_size = kv_pool.shape[-1], batch.block_size
    block_ids, offsets = batch.slot_mapping // block_size, batch.slot_mapping % block_size
    first_rows = block_ids * (kv_pool.stride(0) // width) + offsets
    heads = torch.arange(num_heads, device=kv_pool.device) * block_size
    return (first_rows[:, None] + heads).flatten()


def logistic(numbers: Tensor) -> Tensor:
    """Computes sigmoids. A number's bits do not depend on the shape that it stands in, as torch.sigmoid's may."""
    return 1 / (1 + torch.exp(-numbers))
