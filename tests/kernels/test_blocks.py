"""Swaps and copies move whole blocks bit for bit, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from blockyard_kernels.blocks import _runs
from blockyard_kernels.ops import BLOCK_SIZES, kv_pool_shape
from tests.kit.kernels.backends import KERNELS, Kernels, read_layer, store
from tests.kit.kernels.random_tensors import random as random_numbers

for_all = pytest.mark.parametrize("kernels", KERNELS, ids=str)


def make_pool(num_blocks: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A pool of random bytes, NaN and infinities among them."""
    shape = kv_pool_shape(num_blocks, 3, 2, 8, 16)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    content = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return content.view(dtype).view(shape)


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(len(pool), -1).view(torch.uint8)


@for_all
@pytest.mark.parametrize("seed", range(4))
def test_a_swap_moves_blocks_and_leaves_the_rest(seed: int, kernels: Kernels):
    device, host = make_pool(20, seed, kernels.dtype), make_pool(9, seed + 50, kernels.dtype)
    expected = as_bytes(host).clone()
    source_before = as_bytes(device).clone()
    chooser = random.Random(seed)
    pairs = list(zip(chooser.sample(range(20), 6), chooser.sample(range(9), 6), strict=True))
    kernels.backend.swap_blocks(device, host, pairs)
    for source, destination in pairs:
        expected[destination] = source_before[source]
    assert torch.equal(as_bytes(host), expected)
    assert torch.equal(as_bytes(device), source_before)


@for_all
def test_out_and_in_again_is_the_same_bytes(kernels: Kernels):
    device = make_pool(12, 1)
    before, host = as_bytes(device).clone(), make_pool(12, 2)
    places = random.Random(3).sample(range(12), 12)
    kernels.backend.swap_blocks(device, host, list(enumerate(places)))
    device.zero_()
    kernels.backend.swap_blocks(host, device, [(place, block) for block, place in enumerate(places)])
    assert torch.equal(as_bytes(device), before)


def test_neighbours_are_one_copy():
    assert list(_runs([(3, 7), (4, 8), (5, 9), (7, 10), (8, 12), (9, 13)])) == [(3, 7, 3), (7, 10, 1), (8, 12, 2)]
    assert list(_runs([])) == []


@for_all
@pytest.mark.parametrize(
    "pairs",
    [
        [(1, 2), (2, 3), (0, 7), (3, 1)],
        [(1, 2), (2, 3)],
        [(0, 4), (1, 5), (2, 6), (0, 3)],
        [(5, 1)],
        [(2, 2), (3, 4)],
    ],
)
def test_copies_read_before_they_write(kernels: Kernels, pairs: list[tuple[int, int]]):
    pool = make_pool(8, 4)
    expected = as_bytes(pool).clone()
    kernels.backend.copy_blocks(pool, pairs)
    sources, destinations = zip(*pairs, strict=True)
    expected[list(destinations)] = as_bytes(make_pool(8, 4))[list(sources)]
    assert torch.equal(as_bytes(pool), expected)


@for_all
def test_nothing_to_do_is_no_error(kernels: Kernels):
    pool = make_pool(2, 5)
    kernels.backend.copy_blocks(pool, [])
    kernels.backend.swap_blocks(pool, make_pool(2, 6), [])


@for_all
@pytest.mark.parametrize("pair", [(8, 0), (0, 8), (-1, 0), (0, -1)])
def test_an_id_outside_the_pool_is_refused(pair: tuple[int, int], kernels: Kernels):
    pool, other = make_pool(8, 7), make_pool(8, 8)
    before = as_bytes(pool).clone(), as_bytes(other).clone()
    with pytest.raises(ValueError, match="outside a pool of 8 blocks"):
        kernels.backend.copy_blocks(pool, [(1, 2), pair])
    with pytest.raises(ValueError, match="outside a pool of 8 blocks"):
        kernels.backend.swap_blocks(pool, other, [(1, 2), pair])
    assert torch.equal(as_bytes(pool), before[0])
    assert torch.equal(as_bytes(other), before[1])


@for_all
def test_pools_of_two_layouts_are_refused(kernels: Kernels):
    with pytest.raises(ValueError, match="differ in layout"):
        kernels.backend.swap_blocks(
            make_pool(4, 0), torch.zeros(kv_pool_shape(4, 3, 2, 16, 16), dtype=torch.bfloat16), []
        )


def test_a_block_is_one_contiguous_range():
    pool = make_pool(4, 9)
    assert pool[2].is_contiguous()
    assert pool.stride(0) == pool[2].numel()


@for_all
@pytest.mark.parametrize("block_size", [0, 1, 4, 12, 24, 512])
def test_block_sizes_that_do_not_divide_a_split_are_refused(block_size: int, kernels: Kernels):
    assert block_size not in BLOCK_SIZES
    with pytest.raises(ValueError, match=f"block_size must be one of .*, not {block_size}"):
        kv_pool_shape(4, 1, 1, block_size, 16)
    with pytest.raises(ValueError, match="block_size"):
        kernels.backend.plan_attention([1], [1], [[0]], block_size)


@for_all
def test_cleared_slots_are_zero_and_no_others(kernels: Kernels) -> None:
    pool = torch.zeros(kv_pool_shape(4, 2, 2, 8, 16), dtype=kernels.dtype)
    keys_values = random_numbers(2, 20, 2, 16, dtype=kernels.dtype)
    for layer in (0, 1):
        store(kernels.backend, pool, layer, [[3, 1, 2]], [keys_values])
    expected = [read_layer(kernels, pool, layer).clone() for layer in (0, 1)]
    assert all(each[[3, 1], :, :, 5].ne(0).any() for each in expected)
    for each in expected:
        each[3, :, :, 7] = each[1, :, :, 0] = each[2, :, :, 3] = 0
    kernels.backend.clear_slots(pool, np.array([3, 1, 2]), np.array([7, 0, 3]))
    for layer in (0, 1):
        assert torch.equal(read_layer(kernels, pool, layer), expected[layer])
