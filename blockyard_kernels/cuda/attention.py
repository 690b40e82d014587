"""Paged attention over any mix of prefill pieces and decodes: FlashAttention's online softmax (arXiv 2205.14135), cut
along the keys as in FlashDecoding, over the work list of `blockyard_kernels.cuda.plan`.

Query heads that share a key-value head are rows of one tile, since they read the same keys. A fixed number of programs
walks through the work items. Each item is computed separately, and a second launch adds the partial results of split
tiles in index order. No program waits for another program of its launch.

In invariant mode a row's bits depend on its own query, keys and position only. Keys are read in tiles, and tiles are
grouped into splits of SPLIT keys, both counted from position 0. Splits are merged in index order by the same function,
whether one program computes all splits or each split has its own program. A tile or split whose keys the row does not
see changes no bit, since its weights are exact zeros. All tiles have the same number of rows, so that the same
instructions multiply them. The other rows of a batch only influence which program does the work.
"""
# Triton functions are not plain Python: pyright understands only their syntax.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockyard_kernels.cuda.epilogue import bounded
from blockyard_kernels.cuda.launch_table import attention_launch
from blockyard_kernels.cuda.plan import StepLengths, WorkList, make_work_list

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.ops import AttentionBatch
    from blockyard_kernels.shapes import AttentionShape


LOG2_OF_E = tl.constexpr(math.log2(math.e))


def paged_attention(
    query: Tensor,
    batch: AttentionBatch,
    kv_pool: Tensor,
    layer: int,
    shape: AttentionShape,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    *,
    invariant: bool,
    num_multiprocessors: int,
) -> Tensor:
    """See `blockyard_kernels.ops.Backend.paged_attention`. Padding rows, whose positions are below 0, become zeros.

    Softmax weights are rounded to the query's dtype before they multiply the values. All other arithmetic is float32,
    and the result is rounded once.

    Args:
        query: [T, H, D], contiguous.
        batch: the step; the first call for each kind of layer makes its work list and stores it in `work_lists`.
        kv_pool: contiguous.
        layer: index of the layer in the pool.
        shape: the model's heads.
        sliding_window: keys that a query sees, or None.
        sinks: [H] float32, or None.
        invariant: whether a row has the same bits in every step.
        num_multiprocessors: number of multiprocessors of the device.
    """
    kind = (paged_attention, shape, sliding_window, invariant)
    work: WorkList | None = batch.work_lists.get(kind)
    if work is None:
        lengths = StepLengths.of(batch)
        work = make_work_list(
            lengths, shape, batch.block_size, sliding_window, num_multiprocessors, invariant=invariant
        )
        batch.work_lists[kind] = work
    return attend(query, work, kv_pool, layer, shape, sinks)


def attend(
    query: Tensor, work: WorkList, kv_pool: Tensor, layer: int, shape: AttentionShape, sinks: Tensor | None = None
) -> Tensor:
    """Attends to the items of a work list, and merges split tiles -> [T, H * D]. Arguments as for `paged_attention`."""
    tiling, dim = work.tiling, max(16, triton.next_power_of_2(shape.head_dim))
    output = query.new_empty(len(query), shape.num_heads * shape.head_dim)
    num_partials = tiling.num_kinds * tiling.max_partials * shape.num_heads
    partials = query.new_empty(num_partials, shape.head_dim, dtype=torch.float32)
    statistics = query.new_empty(num_partials, 2, dtype=torch.float32)
    heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    # With a softcap, scores are scaled by 2 / softcap as well: see `blockyard_kernels.cuda.epilogue.bounded`.
    scale = shape.scale * math.log2(math.e) * (2 / shape.softcap if shape.softcap else 1)
    tables = work.lengths.block_tables
    for kind in range(tiling.num_kinds if len(tables) else 0):
        rows = tiling.tile_rows[kind]
        launch = attention_launch(query.itemsize, rows, dim)
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
        tiles, counts = work.tiles[kind], work.counts[kind]
        _attend_items[(tiling.programs[kind],)](
            query,
            kv_pool[:, layer],
            output,
            partials,
            statistics,
            tiles,
            work.items[kind],
            counts,
            tables,
            tables.stride(0),
            kv_pool.stride(0),
            work.window,
            scale,
            sinks,
            *heads,
            kv_pool.shape[4],
            rows,
            dim,
            launch.key_tile,
            work.split,
            shape.softcap * math.log2(math.e),
            **options,
        )
        if tiling.max_partials:
            merges = min(tiling.programs[kind], tiling.max_tiles * shape.num_kv_heads)
            _merge_tiles[(merges,)](output, partials, statistics, tiles, counts, sinks, *heads, rows, dim, **options)
    return output


@triton.jit
def _nothing(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Returns the state of a row without keys: weighted sum of values, maximum score and sum of weights."""
    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    return tl.zeros((ROWS, DIM), tl.float32), maximum, tl.zeros((ROWS,), tl.float32)


@triton.jit
def _merge(total, total_maximum, total_sum, part, maximum, part_sum):
    """Merges a split into the splits before it. Each product and sum is explicit, so that all callers round alike."""
    new = tl.maximum(total_maximum, maximum)
    # If no key has been seen yet, -inf - -inf would be NaN.
    finite = tl.where(new == float("-inf"), 0.0, new)
    old_weight = tl.exp2(total_maximum - finite)
    weight = tl.exp2(maximum - finite)
    total = tl.fma(total, old_weight[:, None] + tl.zeros_like(total), part * weight[:, None])
    return total, new, tl.fma(total_sum, old_weight, part_sum * weight)


@triton.jit
def _attend_range(
    queries,
    positions,
    table,
    keys_of_pool,
    values_of_pool,
    block_stride,
    first_key,
    end_key,
    window,
    scale,
    head_dim: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Returns a tile's weighted sum of values over a range of keys, its maximal score (base 2) and sum of weights."""
    total, maximum, weight_sum = _nothing(queries.shape[0], queries.shape[1])
    dims = tl.arange(0, queries.shape[1])
    for start in range(first_key, end_key, KEY_TILE):
        keys = start + tl.arange(0, KEY_TILE)
        exists = keys < end_key
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=exists, other=0)
        places = blocks.to(tl.int64) * block_stride + keys % BLOCK_SIZE * head_dim
        mask = exists[:, None] & (dims[None, :] < head_dim)
        key = tl.load(keys_of_pool + places[:, None] + dims[None, :], mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        if BOUND > 0:
            scores = bounded(scores, BOUND)
        seen = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None])
        rescale = tl.exp2(maximum - finite)
        weight_sum = weight_sum * rescale + tl.sum(weights, 1)
        value = tl.load(values_of_pool + places[:, None] + dims[None, :], mask=mask, other=0.0)
        total = tl.dot(weights.to(value.dtype), value, total * rescale[:, None], input_precision="ieee")
        maximum = new
    return total, maximum, weight_sum


@triton.jit
def _attend_splits(
    queries,
    positions,
    table,
    keys_of_pool,
    values_of_pool,
    block_stride,
    first_key,
    end_key,
    window,
    scale,
    head_dim: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Like `_attend_range`, but in splits that are merged in index order."""
    total, maximum, weight_sum = _nothing(queries.shape[0], queries.shape[1])
    for start in range(first_key // SPLIT * SPLIT, end_key, SPLIT):
        part, part_maximum, part_sum = _attend_range(
            queries,
            positions,
            table,
            keys_of_pool,
            values_of_pool,
            block_stride,
            tl.maximum(start, first_key),
            tl.minimum(start + SPLIT, end_key),
            window,
            scale,
            head_dim,
            BLOCK_SIZE,
            KEY_TILE,
            BOUND,
        )
        total, maximum, weight_sum = _merge(total, maximum, weight_sum, part, part_maximum, part_sum)
    return total, maximum, weight_sum


@triton.jit
def _rows_of(tile, head, num_heads: tl.constexpr, group: tl.constexpr, ROWS: tl.constexpr):
    """Returns a tile's (token, query head) rows: their index in the step, their index within the tile, and a mask."""
    row = tl.arange(0, ROWS)
    tokens = tl.load(tile + 2)
    inner = row // group * num_heads + head * group + row % group
    return tl.load(tile + 1).to(tl.int64) * num_heads + inner, inner, row < tokens * group


@triton.jit
def _add_sinks(sinks, head, mask, total, maximum, weight_sum):
    """Adds the softmax weight of each head's sink, which has no value, to the merged result of all keys of a row."""
    sink = tl.load(sinks + head, mask=mask, other=float("-inf")) * LOG2_OF_E
    nothing = tl.zeros_like(total)
    total, _, weight_sum = _merge(total, maximum, weight_sum, nothing, sink, tl.zeros_like(weight_sum) + 1)
    return total, weight_sum


@triton.jit
def _store_rows(
    output, rows, inner, total, maximum, weight_sum, mask, sinks, num_heads: tl.constexpr, head_dim: tl.constexpr
):
    """Divides and stores the rows of a tile. A row that sees no key becomes zeros.

    All splits of a row are merged by now, so each sink is added exactly once.
    """
    if sinks is not None:
        total, weight_sum = _add_sinks(sinks, inner % num_heads, mask, total, maximum, weight_sum)
    dims = tl.arange(0, total.shape[1])
    result = total / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    to = output + rows[:, None] * head_dim + dims[None, :]
    tl.store(to, result.to(output.dtype.element_ty), mask=mask[:, None] & (dims[None, :] < head_dim))


@triton.jit(do_not_specialize=["counts", "table_stride", "window"])
def _attend_items(
    query,
    layer_pool,
    output,
    partials,
    statistics,
    tiles,
    items,
    counts,
    block_tables,
    table_stride,
    block_stride,
    window,
    scale,
    sinks,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    KEY_TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BOUND: tl.constexpr,
):
    """Walks through (item, key-value head) pairs, and writes rows of the output or of partial results."""
    group: tl.constexpr = num_heads // num_kv_heads
    dims = tl.arange(0, DIM)
    num_pairs = tl.load(counts + 1) * num_kv_heads
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        item, head = items + pair // num_kv_heads * 4, pair % num_kv_heads
        tile = tiles + tl.load(item) * 8
        first_key, end_key, first_partial = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        rows, inner, mask = _rows_of(tile, head, num_heads, group, ROWS)
        inside = mask[:, None] & (dims[None, :] < head_dim)
        queries = tl.load(query + rows[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
        positions = tl.where(mask, tl.load(tile + 3) + tl.arange(0, ROWS) // group, -1)
        table = block_tables + tl.load(tile).to(tl.int64) * table_stride
        keys = layer_pool + head * (BLOCK_SIZE * head_dim)
        values = keys + num_kv_heads * BLOCK_SIZE * head_dim
        if SPLIT:
            total, maximum, weight_sum = _attend_splits(
                queries, positions, table, keys, values, block_stride, first_key, end_key, window, scale,
                head_dim, BLOCK_SIZE, KEY_TILE, SPLIT, BOUND
            )  # fmt: skip
        else:
            total, maximum, weight_sum = _attend_range(
                queries, positions, table, keys, values, block_stride, first_key, end_key, window, scale,
                head_dim, BLOCK_SIZE, KEY_TILE, BOUND
            )  # fmt: skip
        if first_partial < 0:
            _store_rows(output, rows, inner, total, maximum, weight_sum, mask, sinks, num_heads, head_dim)
        else:
            to = first_partial.to(tl.int64) * num_heads + inner
            tl.store(partials + to[:, None] * head_dim + dims[None, :], total, mask=inside)
            tl.store(statistics + to * 2, maximum, mask=mask)
            tl.store(statistics + to * 2 + 1, weight_sum, mask=mask)


@triton.jit(do_not_specialize=["counts"])
def _merge_tiles(
    output,
    partials,
    statistics,
    tiles,
    counts,
    sinks,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Walks through (split tile, key-value head) pairs, and adds their partial results in index order."""
    group: tl.constexpr = num_heads // num_kv_heads
    dims = tl.arange(0, DIM)
    num_pairs = tl.load(counts) * num_kv_heads
    for pair in range(tl.program_id(0), num_pairs, tl.num_programs(0)):
        tile = tiles + pair // num_kv_heads * 8
        splits = tl.load(tile + 7)
        if splits > 1:
            rows, inner, mask = _rows_of(tile, pair % num_kv_heads, num_heads, group, ROWS)
            inside = mask[:, None] & (dims[None, :] < head_dim)
            total, maximum, weight_sum = _nothing(ROWS, DIM)
            for split in range(splits):
                first_partial = tl.load(tile + 6) + split * tl.load(tile + 2)
                place = first_partial.to(tl.int64) * num_heads + inner
                part = tl.load(partials + place[:, None] * head_dim + dims[None, :], mask=inside, other=0.0)
                part_maximum = tl.load(statistics + place * 2, mask=mask, other=float("-inf"))
                part_sum = tl.load(statistics + place * 2 + 1, mask=mask, other=0.0)
                total, maximum, weight_sum = _merge(total, maximum, weight_sum, part, part_maximum, part_sum)
            _store_rows(output, rows, inner, total, maximum, weight_sum, mask, sinks, num_heads, head_dim)
