"""Tests of batch invariance on this machine: an op must give a row the same bits in any batch, with any threads.

Libraries choose different kernels on different processors, so a test on one machine proves nothing for another. All
rows are tested at every row count: in bfloat16 a changed order of summation shows in one of some thousand outputs.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from blockyard_kernels.ops import AttentionBatch, kv_pool_shape
from blockyard_kernels.planning import SPLIT, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from blockyard_kernels.shapes import AttentionShape

    # (rows [T, H, D], batch, pool of one layer) -> [T, H * D].
    Attend = Callable[[Tensor, AttentionBatch, Tensor], Tensor]
    SetNumThreads = Callable[[int], None]

NUM_ROWS = 96
MAX_ROWS = 512
ROW_COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 16, 17, 27, 32, 64, 130, MAX_ROWS)
# The length of the test sequence: its keys reach into a second split.
LENGTH = SPLIT + 44
BLOCK_SIZE = 16
NUM_PIECES, MAX_PIECE = 40, 63


def keeps_rows(
    compute: Callable[[Tensor], Tensor],
    rows: Tensor,
    set_num_threads: SetNumThreads,
    *,
    max_rows: int = MAX_ROWS,
    tries_one_thread: bool = True,
) -> bool:
    """Returns whether each of NUM_ROWS rows has the same bits at every row count as with all NUM_ROWS together."""
    expected = compute(rows)
    for _ in _thread_counts(set_num_threads, tries_one_thread):
        for count in ROW_COUNTS:
            if count > max_rows:
                continue
            parts = rows.split(count) if count <= NUM_ROWS else [rows.repeat(-(-count // NUM_ROWS), 1)[:count]]
            got = torch.cat([compute(part.clone()) for part in parts])
            if not all(torch.equal(some, expected[: len(some)]) for some in got.split(NUM_ROWS)):
                return False
    return True


def attention_keeps_rows(
    attend: Attend, shape: AttentionShape, dtype: torch.dtype, set_num_threads: SetNumThreads
) -> bool:
    """Returns whether attention gives a row the same bits in pieces of any length and position, alone or batched.

    It tests one sequence. The pool holds random numbers, so the backend's layout of keys and values does not matter.
    """
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    sizes = (num_blocks, 1, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    pool = random_numbers(*kv_pool_shape(*sizes), seed=8).to(dtype)
    query = random_numbers(LENGTH, shape.num_heads, shape.head_dim, seed=4).to(dtype)

    def compute(pieces: Sequence[tuple[int, int]]) -> Tensor:
        """Computes rows [start, end) of each piece."""
        counts, ends = [end - start for start, end in pieces], [end for _, end in pieces]
        tables = [list(range(num_blocks))] * len(pieces)
        batch = plan(counts, ends, tables, BLOCK_SIZE, None, query.device)
        return attend(torch.cat([query[start:end] for start, end in pieces]), batch, pool)

    whole = compute([(0, LENGTH)])
    for _ in _thread_counts(set_num_threads, tries_one_thread=True):
        for pieces in _arrangements():
            expected = torch.cat([whole[start:end] for start, end in pieces])
            if not torch.equal(compute(pieces), expected):
                return False
    return True


def random_numbers(*shape: int, seed: int) -> Tensor:
    """Draws float32 numbers of the normal distribution, the same ones for a seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _thread_counts(set_num_threads: SetNumThreads, tries_one_thread: bool) -> Iterator[int]:
    """Sets each number of threads that a step may run with in turn, and restores the first one at the end."""
    available = torch.get_num_threads()
    yield available
    if tries_one_thread and available > 1:
        set_num_threads(1)
        try:
            yield 1
        finally:
            set_num_threads(available)


def _arrangements() -> Iterator[list[tuple[int, int]]]:
    """Yields lists of pieces: the whole sequence, single tokens, and random pieces; many at once and few at once."""
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
