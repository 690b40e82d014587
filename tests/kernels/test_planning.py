"""A step's metadata and work lists: every (row, key) pair exactly once, whatever the step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard_kernels.planning import SPLIT, make_waves
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import AttentionShape

if TYPE_CHECKING:
    from blockyard_kernels.ops import AttentionBatch

BACKEND = get_backend(torch.device("cpu"), torch.float32, "reference")
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 90), st.integers(0, 600)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=5
)


def plan(sequences: list[tuple[int, int]], block_size: int = 16) -> AttentionBatch:
    first, tables = 0, []
    for _, length in sequences:
        count = -(-length // block_size)
        tables.append(list(range(first, first + count)))
        first += count
    return BACKEND.plan_attention(
        [new for new, _ in sequences], [length for _, length in sequences], tables, block_size
    )


@given(SEQUENCES)
@settings(deadline=None, max_examples=60)
def test_positions_and_slots(sequences: list[tuple[int, int]]):
    batch = plan(sequences)
    expected = [position for new, length in sequences for position in range(length - new, length)]
    assert batch.positions.tolist() == expected
    assert batch.num_tokens == len(expected)
    # Tables count up from block 0, so a sequence's slots follow from its first block.
    firsts = np.cumsum([0, *(-(-length // 16) for _, length in sequences)]) * 16
    slots = [
        first + position
        for first, (new, length) in zip(firsts, sequences, strict=False)
        for position in range(length - new, length)
    ]
    assert batch.slot_mapping.tolist() == slots


@given(SEQUENCES)
@settings(deadline=None, max_examples=60)
def test_a_fresh_block_is_one_that_is_started_and_not_filled(sequences: list[tuple[int, int]]):
    batch = plan(sequences)
    offsets = (batch.slot_mapping % 16).tolist()
    blocks = (batch.slot_mapping // 16).tolist()
    started = {block for block, offset in zip(blocks, offsets, strict=True) if offset == 0}
    filled = {block for block, offset in zip(blocks, offsets, strict=True) if offset == 15}
    assert set(batch.fresh_blocks.tolist()) == started - filled


@given(SEQUENCES, st.sampled_from([(4, 2), (7, 1), (3, 3), (80, 1)]), st.sampled_from([None, 1, 50, 300]))
@settings(deadline=None, max_examples=60)
def test_every_row_meets_every_key_that_it_sees_once(
    sequences: list[tuple[int, int]], heads: tuple[int, int], window: int | None
):
    """Counts how often each query row meets each key position, over all waves, unmasked."""
    batch = plan(sequences)
    shape = AttentionShape(heads[0], heads[1], 8, 1.0)
    group = heads[0] // heads[1]
    met = np.zeros((batch.num_tokens * heads[0], 1024), np.int64)
    for wave in make_waves(batch, shape, 3, window, 4):
        assert wave.num_rows % 4 == 0
        assert sum(wave.split_tiles) == len(wave.pair_tiles) == len(wave.pool_rows)
        rows = wave.query_rows.view(wave.num_tiles, heads[1], wave.num_rows).numpy()
        seen = np.ones((len(wave.pair_tiles), wave.num_rows, SPLIT), bool)
        seen[wave.masked_pairs.numpy()] = ~wave.mask[:, 0].expand(-1, wave.num_rows, -1).numpy()
        # Address of a pair's first block, head 0: (block * layers * 2 + 0) * K.
        blocks = (wave.pool_rows[:, : SPLIT // 16] // (3 * 2 * heads[1])).numpy()
        for pair, tile in enumerate(wave.pair_tiles.tolist()):
            first_row = rows[tile, 0, 0] // heads[0]
            # What no row sees is not read: the first block that is seen stands in its place.
            least = position_of(batch, first_row, blocks[pair, 0])
            first_block = least // SPLIT * SPLIT
            if window is not None:
                assert least + 16 > batch.positions[first_row] - window + 1
            for head in range(heads[1]):
                assert (rows[tile, head] // group % heads[1] == head).all()
                for row in np.unique(rows[tile, head]):
                    column = int(np.flatnonzero(rows[tile, head] == row)[0])
                    met[row, first_block : first_block + SPLIT] += seen[pair, column]
    positions = batch.positions.numpy().repeat(heads[0])
    keys = np.arange(1024)
    expected = keys <= positions[:, None]
    if window is not None:
        expected &= keys > positions[:, None] - window
    assert (met == expected).all()


def position_of(batch: AttentionBatch, row: int, block: int) -> int:
    """The position at which a row's sequence has a block."""
    sequence = int(np.searchsorted(np.cumsum(batch.num_new_tokens), row, side="right"))
    return int(np.flatnonzero(batch.block_tables[sequence] == block)[0]) * batch.block_size


def test_tables_may_be_lists_tensors_or_an_array():
    lists = [[3, 1, 4], [2, 0]]
    padded = np.array([[3, 1, 4, 9], [2, 0, 9, 9]], np.int32)
    plans = [
        BACKEND.plan_attention([2, 1], [40, 20], tables, 16)
        for tables in (lists, [torch.tensor(row) for row in lists], padded, list(padded))
    ]
    for other in plans[1:]:
        assert torch.equal(other.slot_mapping, plans[0].slot_mapping)
    arrays = BACKEND.plan_attention(np.array([2, 1], np.int32), np.array([40, 20], np.uint32), padded, 16)
    assert arrays.positions.tolist() == [38, 39, 19]


@pytest.mark.parametrize(
    ("new", "lens", "tables", "window", "complaint"),
    [
        ([1, 1], [1], [[0]], None, "2 counts of new tokens, 1 lengths and 1 block tables"),
        ([2], [1], [[0]], None, "fewer tokens after the step"),
        ([-1], [1], [[0]], None, "fewer tokens after the step"),
        ([1], [17], [[0]], None, "too short"),
        ([1], [1], [[0]], 0, "sliding_window must be at least 1"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    new: list[int], lens: list[int], tables: list[list[int]], window: int | None, complaint: str
):
    with pytest.raises(ValueError, match=complaint):
        BACKEND.plan_attention(new, lens, tables, 16, window)
