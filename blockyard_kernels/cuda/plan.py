"""The work list of attention, made on the device from the lengths there, once for all layers of a kind in a step.

A *tile* is some neighbouring new tokens of one sequence, with the query heads that share a key-value head. A *work
item* is a tile and a range of its keys; a tile that has several items is *split*. There are two kinds of tiles and
items: of decodes (at most as many new tokens as a small tile holds) and of prefill pieces. All sizes follow from values
that the host knows, and all counts lie on the device, so that grids and memory are the same for every step of a
captured size.

In fast mode a tile's keys are cut into ranges of one length, which is chosen so that each program has about two items
of a kind. In invariant mode they are cut into ranges of exactly SPLIT keys, counted from position 0. Then the length of
fast mode only decides whether one program walks through all splits of a tile or each split has its own program; the
bits are the same. A tile is not cut if there is no room for its partial results.
"""
# Triton functions are not plain Python: pyright understands only their syntax.
# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from blockyard_kernels.cuda.launch_table import KEY_TILE, MIN_SPLIT, PARTIAL_BYTES, PROGRAMS, TILE_ROWS
from blockyard_kernels.launching import upload

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.ops import AttentionBatch
    from blockyard_kernels.shapes import AttentionShape

SPLIT = 512
"""Keys of a split in invariant mode."""
TILE_COLUMNS = ("sequence", "first row", "tokens", "first position", "first key", "end key", "first partial", "splits")
ITEM_COLUMNS = ("tile", "first key", "end key", "first partial")
# More keys than any sequence has.
NO_WINDOW = 1 << 30


@dataclass(frozen=True, slots=True, eq=False)
class StepLengths:
    """The lengths and block tables of one step, on the device.

    A captured step, whose kernels write them on the device, puts them into `AttentionBatch.work_lists` under this
    class. Sizes are then those of the captured bucket.
    """

    num_new_tokens: Tensor
    """[S] int32."""
    seq_lens: Tensor
    """[S] int32. If a length is below the number of new tokens, the first new tokens are padding and see no keys."""
    block_tables: Tensor
    """[S, widest] int32, its rows contiguous."""
    num_tokens: int
    """T, or an upper bound of it."""
    max_new_tokens: int
    """The most new tokens that a sequence may have."""

    @classmethod
    def of(cls, batch: AttentionBatch) -> StepLengths:
        """Returns the lengths of a step, which the first call copies to the device."""
        found = batch.work_lists.get(cls)
        if found is None:
            device = batch.positions.device
            arrays = (batch.num_new_tokens, batch.seq_lens, batch.block_tables)
            new, lens, tables = (upload(array.astype("int32"), device) for array in arrays)
            found = cls(new, lens, tables, batch.num_tokens, int(batch.num_new_tokens.max(initial=0)))
            batch.work_lists[cls] = found
        return found


@dataclass(frozen=True, slots=True)
class Tiling:
    """The sizes of tiles and work lists, all known to the host. Pairs are (decodes, prefills)."""

    tile_rows: tuple[int, int]
    """Rows of a tile, padding among them."""
    tile_tokens: tuple[int, int]
    """The most tokens of a tile."""
    programs: tuple[int, int]
    """The programs that walk through the items."""
    num_kinds: int
    """1 if no sequence can have more new tokens than a decode's tile holds, else 2."""
    max_tiles: int
    """The most tiles of a kind."""
    max_partials: int
    """The most rows of partial results of a kind; each row holds all heads."""

    @classmethod
    def make(
        cls,
        lengths: StepLengths,
        shape: AttentionShape,
        block_size: int,
        num_multiprocessors: int,
        *,
        invariant: bool,
    ) -> Tiling:
        """Chooses the sizes for a step of these lengths."""
        group = shape.num_heads // shape.num_kv_heads
        decode_rows, prefill_rows = (max(rows, triton.next_power_of_2(group)) for rows in TILE_ROWS[invariant])
        # The most tokens of a decode are the same in both modes, although the rows of its tile differ.
        decode_tokens, prefill_tokens = max(1, TILE_ROWS[False][0] // group), prefill_rows // group
        has_prefills = lengths.max_new_tokens > decode_tokens
        num_seqs, num_tokens = len(lengths.num_new_tokens), lengths.num_tokens
        max_tiles = num_tokens // prefill_tokens + min(num_seqs, num_tokens // (decode_tokens + 1))
        most_splits = -(-lengths.block_tables.shape[1] * block_size // (SPLIT if invariant else MIN_SPLIT))
        most_partials = num_tokens * most_splits if most_splits > 1 else 0
        row_bytes = shape.num_heads * (shape.head_dim + 2) * 4
        return cls(
            tile_rows=(decode_rows, prefill_rows),
            tile_tokens=(decode_tokens, prefill_tokens),
            programs=(PROGRAMS[0] * num_multiprocessors, PROGRAMS[1] * num_multiprocessors),
            num_kinds=2 if has_prefills else 1,
            max_tiles=max(num_seqs, max_tiles if has_prefills else 0),
            max_partials=min(most_partials, PARTIAL_BYTES // row_bytes),
        )


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The tiles and items of a step for layers of one kind."""

    lengths: StepLengths
    tiling: Tiling
    window: int
    """Keys that a query sees."""
    split: int
    """The keys of a split, counted from position 0; 0: ranges have any length."""
    tiles: Tensor
    """[kinds, most tiles, TILE_COLUMNS] int32; a sequence has its tiles ordered from its last tokens to its first."""
    items: Tensor
    """[kinds, most items, ITEM_COLUMNS] int32. If the first partial is -1, the item covers its whole tile."""
    counts: Tensor
    """[kinds, 2] int32: the numbers of tiles and items."""


def make_work_list(
    lengths: StepLengths,
    shape: AttentionShape,
    block_size: int,
    sliding_window: int | None,
    num_multiprocessors: int,
    *,
    invariant: bool,
) -> WorkList:
    """Launches the kernels that make a work list.

    Args:
        lengths: the lengths of the step, on the device.
        shape: the model's heads.
        block_size: tokens of a block.
        sliding_window: keys that a query sees, or None.
        num_multiprocessors: number of multiprocessors; in invariant mode the results do not depend on it.
        invariant: whether ranges are counted from position 0.
    """
    tiling = Tiling.make(lengths, shape, block_size, num_multiprocessors, invariant=invariant)
    new, lens, num_kinds = lengths.num_new_tokens, lengths.seq_lens, tiling.num_kinds
    tiles = new.new_empty(num_kinds, tiling.max_tiles, len(TILE_COLUMNS))
    items = new.new_empty(num_kinds, tiling.max_tiles + tiling.max_partials, len(ITEM_COLUMNS))
    counts = new.new_empty(num_kinds, 2)
    window, split = sliding_window or NO_WINDOW, SPLIT if invariant else 0
    work = WorkList(lengths, tiling, window, split, tiles, items, counts)
    if len(new):
        _make_tiles[(len(new),)](new, lens, tiles, tiling.max_tiles, window, *tiling.tile_tokens, KEY_TILE, 128)
        _make_items[(num_kinds,)](
            new,
            lens,
            tiles,
            items,
            counts,
            len(new),
            tiling.max_tiles,
            tiling.max_partials,
            window,
            shape.num_kv_heads,
            *tiling.programs,
            *tiling.tile_tokens,
            KEY_TILE,
            MIN_SPLIT,
            split,
            128,
        )
    return work


@triton.jit(do_not_specialize=["most_tiles", "window"])
def _make_tiles(
    num_new_tokens,
    seq_lens,
    tiles,
    most_tiles,
    window,
    decode_tokens,
    prefill_tokens,
    KEY_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the tiles of one sequence [S programs], after the tiles of earlier sequences of the same kind."""
    sequence = tl.program_id(0)
    new = tl.load(num_new_tokens + sequence)
    length = tl.load(seq_lens + sequence)
    kind = (new > decode_tokens).to(tl.int32)
    tile_tokens = tl.where(kind == 1, prefill_tokens, decode_tokens)
    first_row = 0
    first_tile = 0
    for start in range(0, sequence, BLOCK):
        others = start + tl.arange(0, BLOCK)
        theirs = tl.load(num_new_tokens + others, mask=others < sequence, other=0)
        same = (theirs > decode_tokens).to(tl.int32) == kind
        first_row += tl.sum(theirs)
        first_tile += tl.sum(tl.where(same, tl.cdiv(theirs, tile_tokens), 0))
    num_tiles = tl.cdiv(new, tile_tokens)
    for start in range(0, num_tiles, BLOCK):
        index = start + tl.arange(0, BLOCK)
        # Later tokens see more keys: the longest items come first.
        offset = (num_tiles - 1 - index) * tile_tokens
        tokens = tl.minimum(new - offset, tile_tokens)
        position = length - new + offset
        end_key = tl.maximum(position + tokens, 0)
        first_key = tl.maximum(position - window + 1, 0) // KEY_TILE * KEY_TILE
        to = tiles + (kind * most_tiles + first_tile + index) * 8
        mask = index < num_tiles
        tl.store(to, sequence + tl.zeros_like(index), mask=mask)
        tl.store(to + 1, first_row + offset, mask=mask)
        tl.store(to + 2, tokens, mask=mask)
        tl.store(to + 3, position, mask=mask)
        tl.store(to + 4, first_key, mask=mask)
        tl.store(to + 5, end_key, mask=mask)


@triton.jit
def _count_work(
    num_new_tokens, seq_lens, num_seqs, window, kind, tile_tokens, decode_tokens,
    KEY_TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Returns the number of tiles of a kind, and of the key tiles that they read, estimated by each sequence's mean."""
    num_tiles = 0
    work = tl.zeros((), tl.int64)
    for start in range(0, num_seqs, BLOCK):
        sequences = start + tl.arange(0, BLOCK)
        new = tl.load(num_new_tokens + sequences, mask=sequences < num_seqs, other=0)
        length = tl.load(seq_lens + sequences, mask=sequences < num_seqs, other=0)
        count = tl.where((new > decode_tokens).to(tl.int32) == kind, tl.cdiv(new, tile_tokens), 0)
        keys = tl.minimum(tl.maximum(length - new // 2, 0), window)
        num_tiles += tl.sum(count)
        work += tl.sum(count.to(tl.int64) * tl.cdiv(keys, KEY_TILE))
    return num_tiles, work


@triton.jit
def _store_items(items, tile, parts, is_split, base, step, first_key, end_key, first_partial, tokens):
    """Writes the items of some tiles, one after another."""
    to = items + (tl.cumsum(parts, 0) - parts) * 4
    for part in range(tl.max(parts)):
        mask = part < parts
        start = base + part * step
        tl.store(to + part * 4, tile, mask=mask)
        tl.store(to + part * 4 + 1, tl.where(is_split, tl.maximum(start, first_key), first_key), mask=mask)
        tl.store(to + part * 4 + 2, tl.where(is_split, tl.minimum(start + step, end_key), end_key), mask=mask)
        tl.store(to + part * 4 + 3, tl.where(is_split, first_partial + part * tokens, -1), mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "most_tiles", "max_partials", "window"])
def _make_items(
    num_new_tokens,
    seq_lens,
    tiles,
    items,
    counts,
    num_seqs,
    most_tiles,
    max_partials,
    window,
    num_kv_heads,
    decode_programs,
    prefill_programs,
    decode_tokens,
    prefill_tokens,
    KEY_TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cuts the tiles of one kind [2 programs] into items, and writes the numbers of tiles and items."""
    kind = tl.program_id(0)
    tile_tokens = tl.where(kind == 1, prefill_tokens, decode_tokens)
    programs = tl.where(kind == 1, prefill_programs, decode_programs)
    num_tiles, work = _count_work(
        num_new_tokens, seq_lens, num_seqs, window, kind, tile_tokens, decode_tokens, KEY_TILE, BLOCK
    )
    longest = tl.maximum(tl.cdiv(work * num_kv_heads, 2 * programs).to(tl.int32) * KEY_TILE, MIN_SPLIT)
    step = SPLIT if SPLIT else longest
    items += kind * (most_tiles + max_partials) * 4
    num_items = 0
    num_partials = tl.zeros((), tl.int64)
    for start in range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        mask = tile < num_tiles
        row = tiles + (kind * most_tiles + tile) * 8
        tokens = tl.load(row + 2, mask=mask, other=0)
        first_key, end_key = tl.load(row + 4, mask=mask, other=0), tl.load(row + 5, mask=mask, other=0)
        base = first_key // SPLIT * SPLIT if SPLIT else first_key
        splits = tl.cdiv(end_key - base, step)
        wanted = tl.where((end_key - first_key > longest) & (splits > 1), splits * tokens, 0)
        ends = num_partials + tl.cumsum(wanted.to(tl.int64), 0)
        is_split = (wanted > 0) & (ends <= max_partials)
        first_partial = tl.where(is_split, kind * max_partials + ends - wanted, -1).to(tl.int32)
        splits = tl.where(is_split, splits, 1)
        tl.store(row + 6, first_partial, mask=mask)
        tl.store(row + 7, splits, mask=mask)
        parts = tl.where(mask, splits, 0)
        _store_items(
            items + num_items * 4, tile, parts, is_split, base, step, first_key, end_key, first_partial, tokens
        )
        num_items += tl.sum(parts)
        num_partials += tl.sum(wanted.to(tl.int64))
    tl.store(counts + kind * 2, num_tiles)
    tl.store(counts + kind * 2 + 1, num_items)
