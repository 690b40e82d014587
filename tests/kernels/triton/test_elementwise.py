"""The ops without products in Triton: the reference's bits, and not a byte beside what they are to write."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels import planning
from kernels.cuda import elementwise
from kernels.lora import VirtualRows
from kernels.ops import kv_pool_shape
from kernels.reference import elementwise as reference
from kernels.shapes import AttentionShape, QueryKeyNorms
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES, reverse_programs

CPU = torch.device("cpu")
for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Some last places in float32, one of which may decide how a value is rounded, and then its product.
ROUNDING = {torch.float32: 2.0**-19, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-6}


def eighths(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers of which every sum of squares is exact in float32, in any order."""
    return random(*shape, seed=seed).mul(8).round().clamp(-31, 31).div(8).to(dtype)


def assert_equal_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Whatever is not a number is so in the same places."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def assert_one_rounding(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.cpu(), expected, rtol=ROUNDING[expected.dtype], atol=1e-7)


@for_dtypes
@pytest.mark.parametrize("width", [1, 2, 15, 48, 131, 1030])
def test_norms_are_the_references(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    guards, weight = Guards(monkeypatch), random(width, dtype=dtype, seed=2)
    for residual in (None, eighths(5, width, dtype=dtype, seed=1)):
        hidden = eighths(5, width, dtype=dtype)
        added = None if residual is None else residual.to(DEVICE)
        normed, total, _ = elementwise.rms_norm(hidden.to(DEVICE), weight.to(DEVICE), 1e-5, added)
        expected = reference.rms_norm(hidden, weight, 1e-5, residual)
        assert_equal_bits(total, expected[1])
        assert_equal_bits(normed, expected[0])
        hidden = random(5, width, dtype=dtype, seed=3)
        normed, total, _ = elementwise.rms_norm(hidden.to(DEVICE), weight.to(DEVICE), 1e-5, added)
        expected = reference.rms_norm(hidden, weight, 1e-5, residual)
        assert_equal_bits(total, expected[1])
        assert_one_rounding(normed, expected[0])
    guards.check()


@for_dtypes
@pytest.mark.parametrize("width", [1, 7, 1024, 1100])
def test_activations_are_the_references(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    guards = Guards(monkeypatch)
    gate_up = random(4, 2 * width, dtype=dtype) * 4
    assert_one_rounding(elementwise.silu_and_mul(gate_up.to(DEVICE)), reference.silu_and_mul(gate_up))
    guards.check()


@for_dtypes
def test_activations_at_the_ends_of_their_range(dtype: torch.dtype):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 9984.0, torch.nan, torch.inf]], dtype=dtype)
    got = elementwise.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], 1).to(DEVICE)).cpu()[0]
    assert got[2:5].tolist() == [0, 100, 9984]
    assert (got[:2].double().abs() < 1e-30).all()
    assert got.isnan().tolist() == [False] * 5 + [True, False]
    assert got[6] == torch.inf


@for_dtypes
def test_rows_have_the_same_bits_in_any_company(dtype: torch.dtype):
    rows, weight = random(9, 131, dtype=dtype).to(DEVICE), random(131, dtype=dtype, seed=1).to(DEVICE)
    normed, _, _ = elementwise.rms_norm(rows, weight, 1e-5, rows.flip(1))
    active = elementwise.silu_and_mul(rows.repeat(1, 2))
    for first, last in ((0, 1), (3, 5), (2, 9)):
        part = rows[first:last]
        assert torch.equal(elementwise.rms_norm(part, weight, 1e-5, part.flip(1))[0], normed[first:last])
        assert torch.equal(elementwise.silu_and_mul(part.repeat(1, 2)), active[first:last])


@for_dtypes
def test_embeddings_are_rows_of_the_table_and_zeros_where_it_ends(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    guards, table = Guards(monkeypatch), random(10, 1033, dtype=dtype).to(DEVICE)
    indices = torch.tensor([3, 3, 9, 0], device=DEVICE)
    assert torch.equal(elementwise.embedding(indices, table), table[indices])
    shifted = elementwise.embedding(torch.tensor([23, 19, 29, 30, 0, 20], device=DEVICE), table, 20)
    expected = torch.stack([table[3], table[0] * 0, table[9], table[0] * 0, table[0] * 0, table[0]])
    assert torch.equal(shifted, expected)
    virtual = VirtualRows(1 << 30, random(2, 1033, dtype=dtype, seed=1).to(DEVICE))
    ids = torch.tensor([3, (1 << 30) + 1, 1 << 30, 10], device=DEVICE)
    expected = torch.stack([table[3], virtual.rows[1], virtual.rows[0], table[0] * 0])
    assert torch.equal(elementwise.embedding(ids, table, virtual=virtual), expected)
    guards.check()


@for_dtypes
def test_nothing_to_do_is_no_error(dtype: torch.dtype):
    nothing, weight = torch.empty(0, 8, dtype=dtype, device=DEVICE), torch.ones(8, dtype=dtype, device=DEVICE)
    assert elementwise.rms_norm(nothing, weight, 1e-5, nothing)[0].shape == (0, 8)
    assert elementwise.silu_and_mul(nothing).shape == (0, 4)
    assert elementwise.embedding(torch.empty(0, dtype=torch.int64, device=DEVICE), nothing).shape == (0, 8)


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


@for_dtypes
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(("head_dim", "heads"), [(8, (4, 2)), (20, (3, 1)), (128, (5, 5))])
def test_rotations_and_what_they_write_are_the_references(
    head_dim: int, heads: tuple[int, int], normed: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    guards, shape = Guards(monkeypatch), AttentionShape(*heads, head_dim, 0.25)
    for num_new, lengths, tables in STEPS:
        batch = planning.plan(num_new, lengths, tables, 8, None, CPU)
        on_device = planning.plan(num_new, lengths, tables, 8, None, DEVICE)
        qkv = eighths(sum(num_new), (heads[0] + 2 * heads[1]) * head_dim, dtype=dtype)
        rotary = rotary_rows(batch.positions, head_dim, dtype)
        weights = (random(head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
        norms = QueryKeyNorms(*weights, 1e-5) if normed else None
        there = norms and QueryKeyNorms(norms.query.to(DEVICE), norms.key.to(DEVICE), norms.epsilon)
        shape_of_pool = kv_pool_shape(6, 2, heads[1], 8, head_dim)
        expected_pool = torch.full(shape_of_pool, torch.nan, dtype=dtype)
        pool = guards.make(qkv.to(DEVICE), shape_of_pool)
        query = elementwise.rotary_and_cache(qkv.to(DEVICE), rotary.to(DEVICE), on_device, pool, 1, shape, there)
        expected = reference.rotary_and_cache(qkv.clone(), rotary, batch, expected_pool, 1, shape, norms)
        assert query.is_contiguous()
        assert_equal_bits(query, expected)
        assert_equal_bits(pool, expected_pool)
        assert (expected_pool == 0).any(), "a block was started"
        reverse_programs(monkeypatch)
    guards.check()


def test_a_pool_is_the_same_bytes_however_its_tokens_came():
    length, shape = 37, AttentionShape(2, 1, 16, 0.25)
    qkv, rotary = random(length, 64).to(DEVICE), rotary_rows(torch.arange(length), 16, torch.float32).to(DEVICE)
    pools: list[torch.Tensor] = []
    for pieces in ([length], [1] * length, [5, 8, 3, 16, 5], [16, 16, 5]):
        pool, start = torch.zeros(kv_pool_shape(5, 1, 1, 8, 16), device=DEVICE), 0
        for count in pieces:
            rows = slice(start, start + count)
            batch = planning.plan([count], [start + count], [[4, 2, 0, 1, 3]], 8, None, DEVICE)
            elementwise.rotary_and_cache(qkv[rows], rotary[rows], batch, pool, 0, shape, None)
            start += count
        pools.append(pool)
    assert all(torch.equal(pool, pools[0]) for pool in pools)


@triton.jit
def _write_offset(slots, offset, block_stride):
    tl.store(offset, elementwise.slot_offset(tl.load(slots), block_stride, 16, 128))


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
        elementwise.rotary_and_cache(qkv.to(DEVICE), rotary.to(DEVICE), batch, each, 0, shape, None)
    assert torch.equal(pool[[0, 2]], near[[0, 2]])
