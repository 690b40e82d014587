"""Rotation and writing to the cache in Triton: the reference's bits, and not a byte beside what they are to write."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl

from blockyard_kernels import planning
from blockyard_kernels.cuda.rows.rotary import rotary_and_cache, slot_offset
from blockyard_kernels.ops import kv_pool_shape
from blockyard_kernels.reference import elementwise as reference
from blockyard_kernels.shapes import AttentionShape, QueryKeyNorms
from tests.kit.kernels.exact_numbers import assert_equal_bits, eighths
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES, reverse_programs

CPU = torch.device("cpu")
for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def rotary_rows(positions: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    half = head_dim // 2
    angles = torch.outer(positions.double(), 100.0 ** -(torch.arange(half, dtype=torch.float64) / half))
    return torch.stack([torch.cat([angles.cos()] * 2, 1), torch.cat([-angles.sin(), angles.sin()], 1)], 1).to(dtype)


# New tokens, lengths and blocks: a block that is filled, ones that are started, one in whose middle a step begins, a
# whole sequence in one block, and neighbours whose slots follow one another.
STEPS = [
    ([3, 0, 11, 1], [6, 8, 11, 9], [[4], [0], [1, 5], [2, 3]]),
    ([8, 2, 1], [16, 2, 1], [[0, 1], [2], [3]]),
]


@dataclass(frozen=True)
class Case:
    """Heads, and what is done with them."""

    head_dim: int
    heads: tuple[int, int]
    rotated: int = 0
    """How many numbers of a head, the first; 0: none."""
    norms: str = ""
    """Of heads or of whole rows, by weights of the model's dtype or wide ones; "": none."""

    def make_norms(self, dtype: torch.dtype) -> QueryKeyNorms | None:
        if not self.norms:
            return None
        is_whole = "rows" in self.norms
        widths = [count * self.head_dim if is_whole else self.head_dim for count in self.heads]
        kind = torch.float32 if "wide" in self.norms else dtype
        weights = [random(width, dtype=kind, seed=seed) for seed, width in enumerate(widths, 1)]
        return QueryKeyNorms(*weights, 1e-5, is_whole)


CASES = [
    Case(8, (4, 2), 8),
    Case(20, (3, 1), 20, "heads"),
    # More heads than a program has.
    Case(256, (6, 2), 256, "wide heads"),
    Case(24, (4, 2), 16, "wide heads"),
    Case(32, (2, 2), 8, "heads"),
    Case(20, (2, 1), 0, "heads"),
    Case(16, (2, 1)),
    Case(24, (4, 2), 24, "wide rows"),
    Case(16, (3, 1), 12, "rows"),
]


@for_dtypes
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotations_and_what_they_write_are_the_references(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    guards, head_dim, heads = Guards(monkeypatch), case.head_dim, case.heads
    shape, norms = AttentionShape(*heads, head_dim, 0.25), case.make_norms(dtype)
    there = norms and norms._replace(query=norms.query.to(DEVICE), key=norms.key.to(DEVICE))
    for num_new, lengths, tables in STEPS:
        batch = planning.plan(num_new, lengths, tables, 8, None, CPU)
        on_device = planning.plan(num_new, lengths, tables, 8, None, DEVICE)
        qkv = eighths(sum(num_new), (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
        rotary = rotary_rows(batch.positions, case.rotated, dtype) if case.rotated else None
        shape_of_pool = kv_pool_shape(6, 2, heads[1], 8, head_dim)
        expected_pool = torch.full(shape_of_pool, torch.nan, dtype=dtype)
        pool = guards.make(qkv.to(DEVICE), shape_of_pool)
        turning = None if rotary is None else rotary.to(DEVICE)
        query = rotary_and_cache(qkv.to(DEVICE, copy=True), turning, on_device, pool, 1, shape, there)
        expected = reference.rotary_and_cache(qkv.clone(), rotary, batch, expected_pool, 1, shape, norms)
        assert query.is_contiguous()
        assert_equal_bits(query, expected)
        assert_equal_bits(pool, expected_pool)
        assert (expected_pool == 0).any(), "a block was started"
        reverse_programs(monkeypatch)
    guards.check()


def test_a_pool_is_the_same_bytes_however_its_tokens_came():
    length, shape = 21, AttentionShape(2, 1, 16, 0.25)
    qkv, rotary = random(length, 64).to(DEVICE), rotary_rows(torch.arange(length), 16, torch.float32).to(DEVICE)
    pools: list[torch.Tensor] = []
    for pieces in ([length], [1] * length, [5, 8, 3, 5], [16, 5]):
        pool, start = torch.zeros(kv_pool_shape(3, 1, 1, 8, 16), device=DEVICE), 0
        for count in pieces:
            rows = slice(start, start + count)
            batch = planning.plan([count], [start + count], [[2, 0, 1]], 8, None, DEVICE)
            rotary_and_cache(qkv[rows], rotary[rows], batch, pool, 0, shape, None)
            start += count
        pools.append(pool)
    assert all(torch.equal(pool, pools[0]) for pool in pools)


@triton.jit
def _write_offset(slots, offset, block_stride):
    tl.store(offset, slot_offset(tl.load(slots), block_stride, 16, 128))


def test_slots_may_lie_further_apart_than_32_bits_reach():
    """Of the pool only what is written is there, on a processor."""
    for block, stride in ((1025, 1 << 21), ((1 << 31) + 3, 1 << 20), (3, (1 << 33) + 64)):
        offset = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        _write_offset[(1,)](torch.tensor([block * 16 + 5], device=DEVICE), offset, stride)
        assert offset.item() == block * stride + 5 * 128
    stride, shape = 2**30, AttentionShape(2, 1, 16, 0.25)
    far = torch.empty(2 * stride + 512, dtype=torch.float16, device=DEVICE)
    pool = far.as_strided((3, 1, 2, 1, 8, 16), (stride, 256, 128, 128, 16, 1))
    near = torch.full(kv_pool_shape(3, 1, 1, 8, 16), torch.nan, dtype=torch.float16, device=DEVICE)
    batch = planning.plan([11], [11], [[0, 2]], 8, None, DEVICE)
    qkv, rotary = random(11, 64, dtype=torch.float16), rotary_rows(torch.arange(11), 16, torch.float16)
    for each in (pool, near):
        rotary_and_cache(qkv.to(DEVICE), rotary.to(DEVICE), batch, each, 0, shape, None)
    assert torch.equal(pool[[0, 2]], near[[0, 2]])
