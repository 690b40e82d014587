"""Products in leaves: the tree's sum, whoever holds which of them, and however many rows there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from blockyard.model_config.parallel_sizes import count_leaves
from blockyard_kernels.reference.int8 import linear_int8
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import LinearSpec, add_leaves
from tests.kit.kernels.backends import COMPILED, CPU, INSTRUCTION_SETS, KERNELS, Kernels, build_kernels
from tests.kit.kernels.random_tensors import random

if TYPE_CHECKING:
    from blockyard_kernels.ops import Backend

for_all = pytest.mark.parametrize("kernels", KERNELS, ids=str)
ROWS = 45


@pytest.mark.parametrize(
    ("in_features", "unit_features", "leaves"),
    [
        (576, 64, 1),  # nine heads
        (1536, 1, 4),
        (896, 64, 2),  # fourteen heads
        (4864, 1, 8),
        (2048, 64, 8),
        (5632, 1, 8),
        (512, 1, 2),
        (256, 32, 8),
        (64, 8, 8),
        (64, 20, 1),
        (36, 1, 1),
        (24, 1, 1),
        (48, 1, 2),
    ],
)
def test_leaves_split_no_head_and_are_long_enough(in_features: int, unit_features: int, leaves: int):
    assert count_leaves(in_features, unit_features) == leaves


def test_neighbours_are_added_first():
    large, small = torch.tensor([1e8]), torch.tensor([3.0])
    assert add_leaves([large, small, -large, small]) == (large + small) + (-large + small)
    assert add_leaves([large, small, -large, small]) != ((large + small) - large) + small
    assert add_leaves([small]) is small


def sum_of_shares(backend: Backend, rows: torch.Tensor, weight: torch.Tensor, leaves: int, num_shares: int):
    """Adds what so many devices come to that share the leaves."""
    pairs = zip(rows.split(rows.shape[1] // num_shares, 1), weight.split(rows.shape[1] // num_shares, 1), strict=True)
    shares = [
        backend.linear(
            part, backend.pack_linear(of_part.contiguous(), spec=LinearSpec(leaves=leaves // num_shares)), wide=True
        )
        for part, of_part in pairs
    ]
    return add_leaves(shares)


@for_all
@pytest.mark.parametrize("width", [128, 1088, 1536])
@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_any_number_of_devices_comes_to_the_same_bits(kernels: Kernels, width: int, leaves: int):
    if kernels.is_reference and kernels.dtype == torch.float16:
        return  # its leaves are float32's, as bfloat16's are
    backend = kernels.backend
    weight, bias = random(72, width, dtype=kernels.dtype), random(72, dtype=kernels.dtype, seed=1)
    rows = random(ROWS, width, dtype=kernels.dtype, seed=2)
    whole = backend.linear(rows, backend.pack_linear(weight, spec=LinearSpec(leaves=leaves)), wide=True)
    for num_shares in (2, 4, 8):
        # Of one leaf alone the reference rounds the sum, unless it computes in float32 anyway.
        if num_shares < leaves or (num_shares == leaves and not (kernels.is_reference and kernels.dtype.itemsize == 2)):
            assert torch.equal(sum_of_shares(backend, rows, weight, leaves, num_shares), whole)
    rounded = backend.linear(rows, backend.pack_linear(weight, bias, LinearSpec(leaves=leaves)))
    assert torch.equal(rounded, (whole + bias.float()).to(kernels.dtype)), "the bias comes once, after the tree"
    assert not torch.equal(backend.linear(rows, backend.pack_linear(weight), wide=True), whole)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "leaves"), [(96, 2), (320, 4), (1536, 8)])
def test_leaves_in_int8_have_scales_of_their_own(instruction_set: str, dtype: torch.dtype, width: int, leaves: int):
    build_kernels()
    backend = get_backend(CPU, dtype, instruction_set, "int8")
    weight, bias = random(50, width, dtype=dtype), random(50, dtype=dtype, seed=1)
    packed = backend.pack_linear(weight, bias, LinearSpec(leaves=leaves))
    for count in (1, 2, 13, ROWS):
        rows = random(count, width, dtype=dtype, seed=count)
        assert torch.equal(backend.linear(rows, packed, wide=True), linear_int8(rows, weight, bias, leaves))
    rows = random(ROWS, width, dtype=dtype)
    whole = linear_int8(rows, weight, None, leaves)
    assert torch.equal(sum_of_shares(backend, rows, weight, leaves, 2), whole)
    assert not torch.equal(linear_int8(rows, weight), whole)


@for_all
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_row_is_the_same_bits_in_any_number_of_rows(kernels: Kernels, gated: bool):
    weight = (random(90, 640) * 0.04).to(kernels.dtype)
    packed = kernels.backend.pack_linear(weight, spec=LinearSpec(gated=gated, leaves=4))
    rows = random(401, 640, dtype=kernels.dtype, seed=1)
    whole = kernels.backend.linear(rows, packed)
    for first, last in ((0, 1), (3, 5), (100, 112), (50, 67), (1, 194), (200, 401)):
        assert torch.equal(kernels.backend.linear(rows[first:last], packed), whole[first:last]), (first, last)


@pytest.mark.parametrize("kernels", COMPILED, ids=str)
def test_leaves_of_no_whole_words_are_refused(kernels: Kernels):
    with pytest.raises(ValueError, match=r"in_features must be a multiple of \d+ in 8 leaves, not 36"):
        kernels.backend.pack_linear(torch.zeros(4, 36, dtype=kernels.dtype), spec=LinearSpec(leaves=8))
