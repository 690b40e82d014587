"""The work list of attention against a model of it that counts one tile after the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from blockyard_kernels.cuda import plan
from blockyard_kernels.cuda.launch_table import KEY_TILE, MIN_SPLIT
from blockyard_kernels.shapes import AttentionShape
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.triton_interpreter import DEVICE

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Trace:
    """A step: new tokens and length of each sequence, and what else its work list depends on."""

    new: list[int]
    lens: list[int]
    group: int = 4
    num_kv_heads: int = 2
    window: int | None = None
    invariant: bool = False
    num_multiprocessors: int = 2
    max_partials: int = 1 << 20
    spare_tokens: int = 0
    """Rows of the captured step that this one does not have."""


def sequences() -> st.SearchStrategy[tuple[int, int]]:
    """(new tokens, length): decodes, pieces, sequences that have no turn, and padding, which lies before position 0."""
    decode = st.integers(1, 3000).map(lambda length: (1, length))
    piece = st.tuples(st.integers(0, 200), st.integers(0, 1500)).map(lambda pair: (pair[0], pair[0] + pair[1]))
    padding = st.integers(1, 40).map(lambda new: (new, 0))
    return st.one_of(decode, piece, padding)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    pairs = draw(st.lists(sequences(), max_size=9))
    return Trace(
        [new for new, _ in pairs],
        [length for _, length in pairs],
        draw(st.sampled_from([1, 3, 4, 8, 71])),
        draw(st.integers(1, 4)),
        draw(st.none() | st.integers(1, 900)),
        draw(st.booleans()),
        draw(st.sampled_from([1, 2, 16, 132])),
        draw(st.sampled_from([0, 5, 40, 1 << 20])),
        draw(st.integers(0, 50)),
    )


def lengths_of(trace: Trace) -> plan.StepLengths:
    def send(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    widest = -(-max(trace.lens, default=0) // BLOCK_SIZE)
    tables = torch.zeros(len(trace.new), widest, dtype=torch.int32, device=DEVICE)
    num_tokens = sum(trace.new) + trace.spare_tokens
    return plan.StepLengths(send(trace.new), send(trace.lens), tables, num_tokens, max(trace.new, default=0))


def make(trace: Trace) -> plan.WorkList:
    """Makes the work list in guarded memory."""
    shape = AttentionShape(trace.group * trace.num_kv_heads, trace.num_kv_heads, 64, 0.125)
    with pytest.MonkeyPatch.context() as patch:
        guards = Guards(patch)
        patch.setattr(plan, "PARTIAL_BYTES", trace.max_partials * shape.num_heads * (shape.head_dim + 2) * 4)
        work = plan.make_work_list(
            lengths_of(trace),
            shape,
            BLOCK_SIZE,
            trace.window,
            trace.num_multiprocessors,
            invariant=trace.invariant,
        )
    guards.check()
    return work


def model(trace: Trace, tiling: plan.Tiling, kind: int) -> tuple[list[list[int]], list[list[int]]]:
    """Counts the tiles and items of a kind."""
    window = trace.window or 1 << 30
    tile_tokens, tiles, items = tiling.tile_tokens[kind], list[list[int]](), list[list[int]]()
    first_row, work = 0, 0
    for sequence, (new, length) in enumerate(zip(trace.new, trace.lens, strict=True)):
        if (new > tiling.tile_tokens[0]) == kind:
            for offset in reversed(range(0, new, tile_tokens)):
                tokens, position = min(tile_tokens, new - offset), length - new + offset
                first_key = max(position - window + 1, 0) // KEY_TILE * KEY_TILE
                end_key = max(position + tokens, 0)
                tiles.append([sequence, first_row + offset, tokens, position, first_key, end_key])
                work += -(-min(max(length - new // 2, 0), window) // KEY_TILE)
        first_row += new
    fair = -(-work * trace.num_kv_heads // (2 * tiling.programs[kind])) * KEY_TILE
    longest, partials = max(fair, MIN_SPLIT), 0
    for index, tile in enumerate(tiles):
        tokens, first_key, end_key = tile[2], tile[4], tile[5]
        step = plan.SPLIT if trace.invariant else longest
        base = first_key // plan.SPLIT * plan.SPLIT if trace.invariant else first_key
        starts = list(range(base, end_key, step))
        if end_key - first_key > longest and len(starts) > 1:
            partials += tokens * len(starts)
            if partials <= tiling.max_partials:
                first = kind * tiling.max_partials + partials - tokens * len(starts)
                tile += [first, len(starts)]
                for part, start in enumerate(starts):
                    keys = [max(start, first_key), min(start + step, end_key)]
                    items.append([index, *keys, first + part * tokens])
                continue
        tile += [-1, 1]
        items.append([index, first_key, end_key, -1])
    return tiles, items


@settings(max_examples=40)
@given(traces())
@example(Trace([1] * 140, list(range(1, 9101, 65)), window=4000, invariant=True))
@example(Trace([1, 90], [3000, 1500], window=700, invariant=True, num_multiprocessors=132))
@example(Trace([1, 2600], [16000, 9000], group=8, num_multiprocessors=16))
@example(Trace([1, 150, 1, 1], [0, 0, 700, 5], num_multiprocessors=16))
def test_the_work_list_is_the_models(trace: Trace):
    work = make(trace)
    for kind in range(work.tiling.num_kinds if trace.new else 0):
        num_tiles, num_items = work.counts[kind].tolist()
        tiles, items = model(trace, work.tiling, kind)
        assert work.tiles[kind, :num_tiles].tolist() == tiles
        assert work.items[kind, :num_items].tolist() == items
        assert num_tiles <= work.tiles.shape[1]
        assert num_items <= work.items.shape[1]


@settings(max_examples=20)
@given(traces())
def test_each_row_has_each_of_its_keys_once(trace: Trace):
    work = make(trace)
    seen = {row: list[int]() for row in range(sum(trace.new))}
    partials = list[int]()
    for kind in range(work.tiling.num_kinds if trace.new else 0):
        for tile, first_key, end_key, partial in work.items[kind, : int(work.counts[kind, 1])].tolist():
            _, first_row, tokens, *_ = work.tiles[kind, tile].tolist()
            partials += range(partial, partial + tokens) if partial >= 0 else []
            for row in range(first_row, first_row + tokens):
                seen[row] += range(first_key, end_key)
    assert len(partials) == len(set(partials)), "two items write the same partial results"
    assert max(partials, default=-1) < work.tiling.num_kinds * work.tiling.max_partials
    positions = [
        length - new + token for new, length in zip(trace.new, trace.lens, strict=True) for token in range(new)
    ]
    for row, position in enumerate(positions):
        needed = range(max(position - (trace.window or 1 << 30) + 1, 0), position + 1)
        assert len(seen[row]) == len(set(seen[row])), "a key counts twice"
        assert set(needed) <= set(seen[row])


def test_decodes_on_a_device_with_many_multiprocessors_are_two_items_for_each_program():
    work = make(Trace([1] * 4, [8000] * 4, num_kv_heads=2, num_multiprocessors=12))
    num_pairs = int(work.counts[0, 1]) * 2
    assert 0.8 < num_pairs / (2 * work.tiling.programs[0]) <= 1.2
