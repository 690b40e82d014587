"""Paged attention that gives a row the same bits in every batch. Like `linear`, this module calls matrix products.

The softmax takes two passes and no running rescale, as FlashDecoding's "unified maximum" does (arXiv 2311.01282),
with the true maximum: scores of all splits, one maximum (order-free, hence exact), exponentials, one sum of fixed
length for each split, products with the values for each split, the splits added in index order, one division. A split
whose keys a row does not see adds exact zeros, so it does not matter whether it is computed. All in float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockyard_kernels.planning import SPLIT, Wave, make_waves
from blockyard_kernels.reference.elementwise import cap
from blockyard_kernels.reference.int8 import read_heads

if TYPE_CHECKING:
    from blockyard_kernels.ops import AttentionBatch
    from blockyard_kernels.shapes import AttentionShape

# Bytes of keys converted to float32 at a time: small enough to stay in the cache until they are multiplied.
SLAB_BYTES = 2 << 20
# Multiples to which a tile's rows may be padded, the cheapest first.
ROW_MULTIPLES = (4, 8, 16, 32, 64)


def paged_attention(
    query: Tensor,
    batch: AttentionBatch,
    kv_pool: Tensor,
    layer: int,
    shape: AttentionShape,
    sliding_window: int | None,
    row_multiple: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `blockyard_kernels.ops.Backend.paged_attention`; tiles have a multiple of `row_multiple` rows."""
    kind = (shape, kv_pool.shape[1], sliding_window, row_multiple)
    waves: list[Wave] | None = batch.work_lists.get(kind)
    if waves is None:
        waves = make_waves(batch, shape, kv_pool.shape[1], sliding_window, row_multiple)
        batch.work_lists[kind] = waves
    scaled = (query.float() * shape.scale).view(-1, shape.head_dim)
    result = torch.empty_like(scaled)
    # One row of the view is one head's keys (or values) of one block.
    rows = kv_pool.view(-1, batch.block_size, kv_pool.shape[-1])
    first = layer * 2 * shape.num_kv_heads
    keys, values = rows[first:], rows[first + shape.num_kv_heads :]
    for wave in waves:
        # Padding repeats rows, so some are written more than once, with the same bits.
        result.index_copy_(0, wave.query_rows, _attend(wave, scaled, keys, values, shape, sinks))
    return result.to(query.dtype).view(-1, shape.num_heads * shape.head_dim)


def _attend(
    wave: Wave, query: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, sinks: Tensor | None
) -> Tensor:
    """Computes a wave -> [num_tiles * K * R, D]."""
    num_pairs, heads, dim = len(wave.pair_tiles), shape.num_kv_heads, shape.head_dim
    tiles = query.index_select(0, wave.query_rows).view(wave.num_tiles, heads, wave.num_rows, dim)
    slab = max(1, SLAB_BYTES // (heads * SPLIT * dim * 4))
    slabs = [slice(start, start + slab) for start in range(0, num_pairs, slab)]
    scores = query.new_empty(num_pairs, heads, wave.num_rows, SPLIT)
    for part in slabs:
        picked = tiles.index_select(0, wave.pair_tiles[part]).view(-1, wave.num_rows, dim)
        key = read_heads(keys.index_select(0, wave.pool_rows[part].flatten())).view(-1, SPLIT, dim)
        _multiply(picked, key.transpose(1, 2), scores[part].view(-1, wave.num_rows, SPLIT))
    if shape.softcap:
        scores = cap(scores, shape.softcap)
    _hide(scores, wave)
    maximum = _merge_maxima(scores.amax(-1, keepdim=True), wave)
    sink_scores = None if sinks is None else _sink_rows(sinks, wave, shape)
    if sink_scores is not None:
        maximum = torch.maximum(maximum, sink_scores)
    sums = scores.new_empty(num_pairs, heads, wave.num_rows, 1)
    products = scores.new_empty(num_pairs, heads, wave.num_rows, dim)
    for part in slabs:
        weights = scores[part].sub_(maximum.index_select(0, wave.pair_tiles[part])).exp_()
        torch.sum(weights, -1, keepdim=True, out=sums[part])
        value = read_heads(values.index_select(0, wave.pool_rows[part].flatten())).view(-1, SPLIT, dim)
        _multiply(weights.view(-1, wave.num_rows, SPLIT), value, products[part].view(-1, wave.num_rows, dim))
    divisors = _add_splits(sums, wave)
    if sink_scores is not None:
        divisors += torch.exp(sink_scores - maximum)
    return _add_splits(products, wave).div_(divisors).view(-1, dim)


def _sink_rows(sinks: Tensor, wave: Wave, shape: AttentionShape) -> Tensor:
    """Returns the sink score of each row of the tiles: [num_tiles, K, R, 1]."""
    heads = wave.query_rows % shape.num_heads
    return sinks.index_select(0, heads).view(wave.num_tiles, shape.num_kv_heads, wave.num_rows, 1)


def _multiply(left: Tensor, right: Tensor, result: Tensor) -> None:
    """Multiplies pairs of matrices. A single pair is doubled, since the library would split its sums among threads."""
    if len(left) > 1:
        torch.bmm(left, right, out=result)
    else:
        result.copy_(torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1])


def _hide(scores: Tensor, wave: Wave) -> None:
    """Sets the scores of keys that a row does not see to minus infinity."""
    if len(wave.masked_pairs) == len(scores):
        scores.masked_fill_(wave.mask, float("-inf"))
        return
    hidden = scores.index_select(0, wave.masked_pairs).masked_fill_(wave.mask, float("-inf"))
    scores.index_copy_(0, wave.masked_pairs, hidden)


def _merge_maxima(maxima: Tensor, wave: Wave) -> Tensor:
    """Takes each tile's maximum over its splits [pairs, K, R, 1] -> [num_tiles, K, R, 1]."""
    merged, *others = maxima.split(wave.split_tiles)
    for other in others:
        part = merged[: len(other)]
        torch.maximum(part, other, out=part)
    return merged


def _add_splits(parts: Tensor, wave: Wave) -> Tensor:
    """Adds each tile's splits in index order [pairs, …] -> [num_tiles, …]."""
    total, *others = parts.split(wave.split_tiles)
    for other in others:
        total[: len(other)] += other
    return total
