"""A step's attention metadata, and the work lists that attention walks. Arithmetic on lengths only, in numpy.

A work list cuts a step into (query tile, split of 256 keys) pairs. A tile holds rows of one sequence: the query heads
of a decode that share a key-value head, or the query heads of several neighbouring prefill tokens. Splits are counted
from position 0, whatever the step computes, and each has all 256 keys: keys past a sequence's end are masked, and read
from its last block. Tiles are grouped into waves, which bound the size of temporary tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from blockyard_kernels.launching import upload
from blockyard_kernels.ops import AttentionBatch, BlockTables, check_block_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

    from blockyard_kernels.shapes import AttentionShape

SPLIT = 256
PREFILL_TILE_ROWS = 64
# Bytes of the scores of a wave: small enough to stay in the cache between the two passes.
WAVE_BYTES = 4 << 20

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Wave:
    """Tiles that are computed together. Pairs are ordered by split, then tile; tiles by descending number of splits."""

    num_tiles: int
    num_rows: int
    """R: rows of each tile and key-value head, a multiple of the padding that keeps products exact."""
    query_rows: Tensor
    """[num_tiles * K * R]: rows of the query [T * H, D]; padding repeats a tile's last row."""
    pair_tiles: Tensor
    """[pairs]: each pair's tile."""
    pool_rows: Tensor
    """[pairs, K * blocks of a split]: rows of the pool seen as [-1, block_size * D], in layer 0."""
    split_tiles: tuple[int, ...]
    """For each split the number of tiles that have it: always the first tiles."""
    masked_pairs: Tensor
    """[m]: pairs in which some row does not see some key."""
    mask: Tensor
    """[m, 1, R or 1, SPLIT] bool: true where a key is not seen."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of one width, as columns."""

    sequences: Ints
    first_rows: Ints
    first_positions: Ints
    num_tokens: Ints
    first_splits: Ints
    num_splits: Ints

    def take(self, index: slice | Ints) -> _Tiles:
        return _Tiles(
            self.sequences[index],
            self.first_rows[index],
            self.first_positions[index],
            self.num_tokens[index],
            self.first_splits[index],
            self.num_splits[index],
        )


def plan(
    num_new_tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
    seq_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
    block_tables: BlockTables,
    block_size: int,
    sliding_window: int | None,
    device: torch.device,
    num_kv_groups: int = 1,
    fixed_tables: npt.NDArray[np.integer[Any]] | None = None,
) -> AttentionBatch:
    """See `blockyard_kernels.ops.Backend.plan_attention`."""
    check_block_size(block_size)
    new, lens = np.asarray(num_new_tokens, np.int64), np.asarray(seq_lens, np.int64)
    if not num_kv_groups:
        # No layer reads a slot; all are in the scratch block.
        num_kv_groups, block_tables = 1, np.zeros((len(new), -(-int(lens.max(initial=0)) // block_size)), np.int64)
    tables, num_blocks = _pad_tables(block_tables)
    fixed = np.zeros((len(new), 0), np.int64) if fixed_tables is None else fixed_tables.astype(np.int64)
    if len(fixed) != len(new):
        raise ValueError(f"{len(fixed)} tables of fixed blocks of {len(new)} sequences")
    _check_lengths(new, lens, num_blocks, block_size, sliding_window, num_kv_groups)
    sequences = np.repeat(np.arange(len(new)), new)
    positions = _ramps(lens - new, new)
    last_blocks = np.maximum(lens - 1, 0) // block_size
    fresh = (new > 0) & (lens % block_size > 0) & (last_blocks * block_size >= lens - new)
    sent = upload(positions, device)

    def make(kv_group: int, others: tuple[AttentionBatch, ...] = ()) -> AttentionBatch:
        own = tables[kv_group * len(new) : (kv_group + 1) * len(new)]
        slots = own[sequences, positions // block_size] * block_size + positions % block_size
        return AttentionBatch(
            num_new_tokens=new,
            seq_lens=lens,
            block_tables=own,
            positions=sent,
            slot_mapping=upload(slots, device),
            fresh_blocks=upload(own[fresh, last_blocks[fresh]], device),
            block_size=block_size,
            sliding_window=sliding_window,
            kv_group=kv_group,
            others=others,
            fixed_tables=fixed,
        )

    return make(0, tuple(map(make, range(1, num_kv_groups))))


class AttentionPlanning:
    """The part of a backend that plans attention, equally for all devices: see `blockyard_kernels.ops.Backend`."""

    device: torch.device

    def plan_attention(
        self,
        num_new_tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        seq_lens: Sequence[int] | npt.NDArray[np.integer[Any]],
        block_tables: BlockTables,
        block_size: int,
        sliding_window: int | None = None,
        num_kv_groups: int = 1,
        fixed_tables: npt.NDArray[np.integer[Any]] | None = None,
    ) -> AttentionBatch:
        sizes = block_size, sliding_window, self.device, num_kv_groups
        return plan(num_new_tokens, seq_lens, block_tables, *sizes, fixed_tables)


def make_waves(
    batch: AttentionBatch, shape: AttentionShape, num_layers: int, sliding_window: int | None, row_multiple: int
) -> list[Wave]:
    """Makes the work list of a step for layers of one kind.

    Args:
        batch: the step.
        shape: the model's heads.
        num_layers: layers of the pool, for the addresses of blocks.
        sliding_window: keys that a query sees, or None.
        row_multiple: the rows of a tile are padded to a multiple of this.
    """
    group = shape.num_heads // shape.num_kv_heads
    decodes = batch.num_new_tokens == 1
    pieces = batch.num_new_tokens > 1
    waves: list[Wave] = []
    for chosen, tile_tokens in ((decodes, 1), (pieces, max(1, PREFILL_TILE_ROWS // group))):
        if chosen.any():
            num_rows = -(-tile_tokens * group // row_multiple) * row_multiple
            tiles = _make_tiles(batch, np.flatnonzero(chosen), tile_tokens, sliding_window, shape.is_causal)
            for part in _cut(tiles, WAVE_BYTES // (shape.num_kv_heads * num_rows * SPLIT * 4)):
                waves.append(_make_wave(batch, part, shape, num_layers, sliding_window, num_rows, tile_tokens))
    return waves


def _pad_tables(block_tables: BlockTables) -> tuple[Ints, Ints]:
    """Makes one array of the tables, and counts each table's blocks."""
    if isinstance(block_tables, np.ndarray):
        return block_tables.astype(np.int64), np.full(block_tables.shape[0], block_tables.shape[1], np.int64)
    counts = np.fromiter((len(table) for table in block_tables), np.int64, len(block_tables))
    tables = np.zeros((len(block_tables), int(counts.max(initial=0))), np.int64)
    for row, table in zip(tables, block_tables, strict=True):
        row[: len(table)] = table
    return tables, counts


def _check_lengths(
    new: Ints, lens: Ints, num_blocks: Ints, block_size: int, sliding_window: int | None, num_kv_groups: int
) -> None:
    if not len(new) * num_kv_groups == len(lens) * num_kv_groups == len(num_blocks):
        raise ValueError(f"{len(new)} counts of new tokens, {len(lens)} lengths and {len(num_blocks)} block tables")
    if ((new < 0) | (new > lens)).any():
        raise ValueError("a sequence has fewer tokens after the step than the step computes")
    if (num_blocks.reshape(num_kv_groups, -1) * block_size < lens).any():
        raise ValueError("a block table is too short for its sequence")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")


def _ramps(starts: Ints, counts: Ints) -> Ints:
    """Concatenates the ranges `start, start + 1, …` of `count` numbers each."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def _make_tiles(batch: AttentionBatch, chosen: Ints, tile_tokens: int, window: int | None, is_causal: bool) -> _Tiles:
    """Cuts the new tokens of the chosen sequences into tiles, those with most splits first."""
    first_rows = np.cumsum(batch.num_new_tokens) - batch.num_new_tokens
    new = batch.num_new_tokens[chosen]
    per_sequence = -(-new // tile_tokens)
    sequences = np.repeat(chosen, per_sequence)
    offsets = _ramps(np.zeros_like(new), per_sequence) * tile_tokens
    positions = (batch.seq_lens - batch.num_new_tokens)[sequences] + offsets
    num_tokens = np.minimum(batch.num_new_tokens[sequences] - offsets, tile_tokens)
    first_keys = np.zeros_like(positions) if window is None else np.maximum(positions - window + 1, 0)
    first_splits = first_keys // SPLIT
    last_keys = positions + num_tokens - 1
    if not is_causal:
        ends = batch.seq_lens[sequences] - 1
        last_keys = ends if window is None else np.minimum(ends, last_keys + window - 1)
    num_splits = last_keys // SPLIT - first_splits + 1
    tiles = _Tiles(sequences, first_rows[sequences] + offsets, positions, num_tokens, first_splits, num_splits)
    return tiles.take(np.argsort(-num_splits, kind="stable"))


def _cut(tiles: _Tiles, max_pairs: int) -> Iterator[_Tiles]:
    """Cuts tiles into runs of at most `max_pairs` pairs; a single tile may have more."""
    start, total = 0, 0
    for index, num_splits in enumerate(tiles.num_splits.tolist()):
        if total and total + num_splits > max_pairs:
            yield tiles.take(slice(start, index))
            start, total = index, 0
        total += num_splits
    yield tiles.take(slice(start, None))


def _make_wave(
    batch: AttentionBatch,
    tiles: _Tiles,
    shape: AttentionShape,
    num_layers: int,
    window: int | None,
    num_rows: int,
    tile_tokens: int,
) -> Wave:
    split_tiles = [int((tiles.num_splits > split).sum()) for split in range(int(tiles.num_splits[0]))]
    pair_tiles = np.concatenate([np.arange(count) for count in split_tiles])
    splits = np.repeat(np.arange(len(split_tiles)), split_tiles) + tiles.first_splits[pair_tiles]
    tokens, query_rows = _tile_rows(tiles, shape, num_rows)
    positions = tiles.first_positions[:, None] + (tokens if tile_tokens > 1 else 0)
    ends = positions + 1
    if not shape.is_causal:
        lengths = batch.seq_lens[tiles.sequences][:, None] + 0 * positions
        ends = lengths if window is None else np.minimum(lengths, positions + window)
    masked_pairs, mask = _make_mask(positions[pair_tiles], ends[pair_tiles], splits, window)
    device = batch.positions.device

    def send(array: npt.NDArray[Any]) -> Tensor:
        return upload(array, device)

    return Wave(
        num_tiles=len(tiles.sequences),
        num_rows=num_rows,
        query_rows=send(query_rows.ravel()),
        pair_tiles=send(pair_tiles),
        pool_rows=send(_pool_rows(batch, tiles.take(pair_tiles), splits, shape.num_kv_heads, num_layers, window)),
        split_tiles=tuple(split_tiles),
        masked_pairs=send(masked_pairs),
        mask=send(mask[:, None]),
    )


def _tile_rows(tiles: _Tiles, shape: AttentionShape, num_rows: int) -> tuple[Ints, Ints]:
    """Returns the token of each row within its tile [tiles, R], and the query rows [tiles, K, R]."""
    group = shape.num_heads // shape.num_kv_heads
    rows = np.minimum(np.arange(num_rows), tiles.num_tokens[:, None] * group - 1)
    tokens, members = rows // group, rows % group
    first_heads = np.arange(shape.num_kv_heads)[:, None] * group
    query_rows = (tiles.first_rows[:, None] + tokens)[:, None] * shape.num_heads + first_heads + members[:, None]
    return tokens, query_rows


def _make_mask(positions: Ints, ends: Ints, splits: Ints, window: int | None) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Returns the pairs in which some row does not see all keys of the split, and the mask of the unseen keys.

    `ends` [pairs, R]: one past the last key that each row sees.
    """
    first_keys = splits * SPLIT
    partly = first_keys + SPLIT > ends.min(axis=1)
    if window is not None:
        partly |= first_keys <= positions.max(axis=1) - window
    pairs = np.flatnonzero(partly)
    keys = (first_keys[pairs, None] + np.arange(SPLIT))[:, None]
    unseen = keys >= ends[pairs, :, None]
    if window is not None:
        unseen |= keys <= positions[pairs, :, None] - window
    return pairs, unseen


def _pool_rows(
    batch: AttentionBatch, tiles: _Tiles, splits: Ints, num_kv_heads: int, num_layers: int, window: int | None
) -> Ints:
    """Returns the pool rows of each pair's blocks [pairs, K * blocks of a split].

    Past the sequence's end the last block is repeated, whose unused slots are zero. Blocks before the sliding window
    may belong to other sequences; the first visible block takes their place.
    """
    per_split, sequences = SPLIT // batch.block_size, tiles.sequences
    last_blocks = (batch.seq_lens[sequences] - 1) // batch.block_size
    columns = np.minimum(splits[:, None] * per_split + np.arange(per_split), last_blocks[:, None])
    if window is not None:
        first_blocks = np.maximum(tiles.first_positions - window + 1, 0) // batch.block_size
        columns = np.maximum(columns, first_blocks[:, None])
    block_ids = batch.block_tables[sequences[:, None], columns]
    rows = block_ids[:, None] * (num_layers * 2 * num_kv_heads) + np.arange(num_kv_heads)[:, None]
    return rows.reshape(len(sequences), -1)
