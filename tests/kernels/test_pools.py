"""The borders of a pool: offsets past 2^31 elements, bytes beside it, and what earlier owners left in its blocks."""

from __future__ import annotations

import mmap

import pytest
import torch

from blockyard_kernels.ops import BLOCK_SIZES, kv_pool_shape
from blockyard_kernels.shapes import AttentionShape
from tests.kit.kernels.backends import KERNELS, Kernels, in_dtype

# Linux; Python 3.11 does not name it.
MAP_NORESERVE = 0x4000
MARGIN = 4096
CANARY = 0xA5
for_all = pytest.mark.parametrize("kernels", KERNELS, ids=str)


def still(num_rows: int, shape: AttentionShape, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random queries, keys and values, and rotary rows that turn nothing."""
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    angles = torch.stack([torch.ones(num_rows, shape.head_dim), torch.zeros(num_rows, shape.head_dim)], dim=1)
    return qkv, angles.to(dtype)


def virtual_pool(num_blocks: int, shape: AttentionShape, dtype: torch.dtype) -> torch.Tensor:
    """A pool of addresses: a page of memory is taken when it is touched."""
    size = kv_pool_shape(num_blocks, 2, shape.num_kv_heads, 256, shape.head_dim)
    num_bytes = torch.Size(size).numel() * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(memory, dtype=dtype).view(size)


@pytest.mark.parametrize("kernels", in_dtype(KERNELS, torch.float32, torch.bfloat16), ids=str)
def test_offsets_past_two_to_the_31_are_right(kernels: Kernels):
    """A pool of 2.2e9 elements, of which only its last blocks are ever touched."""
    backend, dtype = kernels.backend, kernels.dtype
    shape = AttentionShape(2, 1, 64, 0.125)
    num_blocks = (2**31 + 2**26) // (2 * 2 * 1 * 256 * 64)
    large, small = virtual_pool(num_blocks, shape, dtype), virtual_pool(2, shape, dtype)
    assert large.numel() > 2**31
    qkv, rotary = still(260, shape, dtype)
    results: list[torch.Tensor] = []
    for pool, table in ((large, [num_blocks - 1, num_blocks - 2]), (small, [1, 0])):
        batch = backend.plan_attention([260], [260], [table], 256)
        query = backend.rotary_and_cache(qkv.clone(), rotary, batch, pool, 1, shape)
        results.append(backend.paged_attention(query, batch, pool, 1, shape))
    assert torch.equal(results[0], results[1])
    assert torch.equal(large[-2:], small), "what was written lies where it should"
    backend.copy_blocks(large, [(num_blocks - 1, num_blocks - 3)])
    backend.swap_blocks(small, large, [(0, num_blocks - 4)])
    assert torch.equal(large[-4:-2], small), "whole blocks move as far"


def fenced(size: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, and the bytes around it with it."""
    num_bytes = torch.Size(size).numel() * dtype.itemsize
    whole = torch.full((MARGIN + num_bytes + MARGIN,), CANARY, dtype=torch.uint8)
    return whole[MARGIN:-MARGIN].view(dtype).view(size), whole


@for_all
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", [8, 20, 80])
def test_the_first_and_the_last_block_end_where_they_end(head_dim: int, block_size: int, kernels: Kernels):
    backend, shape = kernels.backend, AttentionShape(3, 1, head_dim, 0.3)
    pool, whole = fenced(kv_pool_shape(4, 1, 1, block_size, head_dim), kernels.dtype)
    before = whole.clone()
    length = 2 * block_size - 1
    qkv, rotary = still(length, shape, kernels.dtype)
    batch = backend.plan_attention([length], [length], [[3, 0]], block_size)
    query = backend.rotary_and_cache(qkv, rotary, batch, pool, 0, shape)
    filled = whole.clone()
    assert backend.paged_attention(query, batch, pool, 0, shape).isfinite().all()
    assert torch.equal(whole, filled), "attention writes nothing to the pool"
    written = pool[[3, 0]].nbytes // 2
    unharmed = torch.ones(len(whole), dtype=torch.bool)
    unharmed[MARGIN : MARGIN + written] = unharmed[-MARGIN - written : -MARGIN] = False
    assert torch.equal(whole[unharmed], before[unharmed]), "bytes outside the two blocks"
    assert pool.isfinite().all(), "the canary is a number in every dtype"


@for_all
def test_operands_may_begin_at_any_element(kernels: Kernels):
    """Rows of a buffer of bytes are aligned to nothing but their element."""
    backend, dtype = kernels.backend, kernels.dtype
    shape = AttentionShape(3, 1, 16, 0.3)
    batch = backend.plan_attention([5], [5], [[0]], 8)
    qkv, rotary = still(5, shape, dtype)
    results: list[torch.Tensor] = []
    for shift in (0, 1):
        pool = torch.zeros(2 * 8 * 16 + 1, dtype=dtype)[shift : shift + 2 * 8 * 16].view(1, 1, 2, 1, 8, 16)
        rows = torch.cat([qkv.new_zeros(1), qkv.flatten()])[1:] if shift else qkv.flatten().clone()
        query = backend.rotary_and_cache(rows.view(5, -1), rotary, batch, pool, 0, shape)
        attended = backend.paged_attention(query, batch, pool, 0, shape)
        normed, _ = backend.rms_norm(rows.view(5, -1), rows[:80], 1e-5)
        results.append(torch.cat([attended, normed], dim=1))
    assert torch.equal(results[0], results[1])


@for_all
@pytest.mark.parametrize("block_size", [8, 32])
def test_a_block_that_changes_hands_is_clean_without_being_cleared(block_size: int, kernels: Kernels):
    """Its last owner's NaN are gone with the first token of the next; without a first token it keeps what it holds."""
    backend, shape, dtype = kernels.backend, AttentionShape(3, 1, 16, 0.3), kernels.dtype
    qkv, rotary = still(37, shape, dtype)
    results: list[torch.Tensor] = []
    for left_behind in (0.0, float("nan")):
        pool = torch.full(kv_pool_shape(6, 1, 1, block_size, 16), left_behind, dtype=dtype)
        rows: list[torch.Tensor] = []
        for start, end in ((0, 1), (1, 2), (2, 31), (31, 33), (33, 37)):
            batch = backend.plan_attention([end - start, 0], [end, 0], [[3, 1, 5, 0, 4], []], block_size)
            query = backend.rotary_and_cache(qkv[start:end].clone(), rotary[start:end], batch, pool, 0, shape)
            rows.append(backend.paged_attention(query, batch, pool, 0, shape))
        results.append(torch.cat(rows))
        untouched = torch.full_like(pool[2], left_behind)
        torch.testing.assert_close(pool[2], untouched, rtol=0, atol=0, equal_nan=True)
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
