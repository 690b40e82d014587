"""Proves at start, on this machine, that a row's bits do not depend on the rows beside it.

Libraries choose other kernels on other processors, so a measurement on one machine proves nothing for the next:
each op is tried in the shapes that a model gives it. All rows go through every row count: in bfloat16 a sum that was
made in another order shows in one output of some thousands only.
"""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from kernels.ops import kv_pool_shape
from kernels.planning import SPLIT, plan
from kernels.reference import elementwise
from kernels.reference.attention import ROW_MULTIPLES, paged_attention
from kernels.reference.linear import LADDER, MAX_ROWS, Method, ReferenceLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from kernels.ops import AttentionShape

NUM_ROWS = 96
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 27, 32, 64, 130, MAX_ROWS)
# Products of larger weights are never left to one thread (`model_runner.settle_threads`), and would take it long.
MAX_SINGLE_THREAD_WEIGHTS = 1 << 22
# Outputs of shards, a multiple of 16 each: others are not promised, and Intel's AVX2 kernels give them other bits.
SHARDS = (128, 64, 48, 32, 16)
EPSILON = 1e-6
# A sequence whose keys reach into a second split, in blocks of this size.
LENGTH = SPLIT + 44
BLOCK_SIZE = 16
NUM_PIECES, MAX_PIECE = 40, 63


def settle_linears(linears: Iterable[ReferenceLinear]) -> bool:
    """Steps the linears of each shape down the ladder until they are exact; tells whether all shapes got there."""
    alike: defaultdict[tuple[object, ...], list[ReferenceLinear]] = defaultdict(list)
    for linear in linears:
        alike[linear.out_features, linear.is_gated, linear.in_features, linear.dtype, linear.method].append(linear)
    settled = [_settle(group) for group in alike.values()]
    return all(settled)


def _settle(group: list[ReferenceLinear]) -> bool:
    first = group[0]
    fastest = first.method
    for method in LADDER[LADDER.index(fastest) :]:
        if first.method is not method:
            first.pack(method)
        if rows_are_independent(first) and columns_are_independent(first.in_features, first.dtype, method):
            for other in group[1:]:
                if other.method is not method:
                    other.pack(method)
            return True
    first.pack(fastest)
    return False


def rows_are_independent(linear: ReferenceLinear) -> bool:
    """Returns whether the rows of a product are the same bits for every row count, on one thread too if it may be.

    Before they are rounded: of 65,536 sums that differ in float32, one or two do in bfloat16.
    """
    rows = _random(NUM_ROWS, linear.in_features, seed=7).to(linear.dtype)
    return _keeps_rows(linear.unrounded, rows, linear.max_rows, linear.num_weights <= MAX_SINGLE_THREAD_WEIGHTS)


def columns_are_independent(in_features: int, dtype: torch.dtype, method: Method) -> bool:
    """Returns whether an output of such a product has the same bits in a shard of its weight and in the whole."""
    weight = (_random(sum(SHARDS), in_features, seed=9) * in_features**-0.5).to(dtype)
    rows = _random(NUM_ROWS, in_features, seed=7).to(dtype)
    whole = ReferenceLinear(weight, None, method).unrounded(rows)
    shards = [ReferenceLinear(shard, None, method).unrounded(rows) for shard in weight.split(SHARDS)]
    return torch.equal(torch.cat(shards, dim=1), whole)


def elementwise_is_independent(linears: Iterable[ReferenceLinear]) -> bool:
    """Returns whether norms and activations give a row the same bits for every row count, at the linears' widths."""
    linears = list(linears)
    normed = {(linear.in_features, linear.dtype) for linear in linears}
    gated = {(linear.out_features, linear.dtype) for linear in linears if linear.is_gated}
    weights = {(width, dtype): _random(width, seed=6).to(dtype) for width, dtype in normed}
    return all(
        _keeps_rows(lambda rows, weight=weight: elementwise.normalise(rows, weight, EPSILON), _wide(width, dtype))
        for (width, dtype), weight in weights.items()
    ) and all(_keeps_rows(elementwise.silu_and_mul, _wide(2 * width, dtype)) for width, dtype in gated)


def _wide(width: int, dtype: torch.dtype) -> Tensor:
    return _random(NUM_ROWS, width, seed=5).to(dtype)


def _keeps_rows(
    compute: Callable[[Tensor], Tensor], rows: Tensor, max_rows: int = MAX_ROWS, tries_one_thread: bool = True
) -> bool:
    """Returns whether rows computed in parts of any count, with others behind them, are what they are together."""
    expected = compute(rows)
    for _ in _thread_counts(tries_one_thread):
        for count in ROW_COUNTS:
            if count > max_rows:
                continue
            parts = rows.split(count) if count <= NUM_ROWS else [rows.repeat(-(-count // NUM_ROWS), 1)[:count]]
            got = torch.cat([compute(part.clone()) for part in parts])
            if not all(torch.equal(some, expected[: len(some)]) for some in got.split(NUM_ROWS)):
                return False
    return True


def _thread_counts(tries_one_thread: bool) -> Iterator[int]:
    """Sets the counts of threads that a step may be computed with, one after the other, and goes back to the first."""
    available = torch.get_num_threads()
    yield available
    if tries_one_thread and available > 1:
        torch.set_num_threads(1)
        try:
            yield 1
        finally:
            torch.set_num_threads(available)


def find_row_multiple(shape: AttentionShape) -> int | None:
    """Finds what attention's tiles must be padded to a multiple of, or None where nothing helps."""
    return next((multiple for multiple in ROW_MULTIPLES if tiles_are_independent(shape, multiple)), None)


def tiles_are_independent(shape: AttentionShape, row_multiple: int) -> bool:
    """Returns whether attention gives a row the same bits in pieces of any length and place, alone and among others.

    Tried by the op itself over one sequence. In float32, as all of its products are, whatever the dtype of a model.
    """
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    sizes = (num_blocks, 1, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    pool = _random(*kv_pool_shape(*sizes), seed=8)
    query = _random(LENGTH, shape.num_heads, shape.head_dim, seed=4)

    def attend(pieces: Sequence[tuple[int, int]]) -> Tensor:
        """Computes rows [start, end) of each piece."""
        counts, ends = [end - start for start, end in pieces], [end for _, end in pieces]
        tables = [list(range(num_blocks))] * len(pieces)
        batch = plan(counts, ends, tables, BLOCK_SIZE, None, query.device)
        rows = torch.cat([query[start:end] for start, end in pieces])
        return paged_attention(rows, batch, pool, 0, shape, None, row_multiple)

    whole = attend([(0, LENGTH)])
    for _ in _thread_counts(tries_one_thread=True):
        for pieces in _arrangements():
            expected = torch.cat([whole[start:end] for start, end in pieces])
            if not torch.equal(attend(pieces), expected):
                return False
    return True


def _arrangements() -> Iterator[list[tuple[int, int]]]:
    """Lists the whole, each token alone, and pieces at random places: all together, and few at a time."""
    chooser = random.Random(3)
    lengths = [chooser.randint(2, MAX_PIECE) for _ in range(NUM_PIECES)]
    starts = [chooser.randrange(LENGTH - length) for length in lengths]
    pieces = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    decodes = [(position, position + 1) for position in range(LENGTH)]
    yield [(0, LENGTH)]
    yield decodes
    yield pieces
    yield [*decodes[::7], *pieces[::3]]
    for index in range(6):
        yield pieces[index : index + 1 + index // 2]
        yield decodes[50 * index : 50 * index + 1 + index // 2]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
