"""Products of weights as a checkpoint has quantized them: all kernels give the bits of the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch

from blockyard_kernels.packed import QuantizedWeight
from blockyard_kernels.reference.int8 import linear_int8, quantize_rows
from blockyard_kernels.reference.quantized import linear_quantized
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import LinearSpec
from tests.kit.kernels.backends import INSTRUCTION_SETS, build_kernels
from tests.kit.kernels.random_tensors import random

if TYPE_CHECKING:
    from blockyard_kernels.ops import Backend

CPU = torch.device("cpu")
KERNELS = [*INSTRUCTION_SETS, "reference"]
DTYPES = [torch.bfloat16, torch.float32]
# (outputs, inputs, group, leaves): whole panels and parts of one, one group and many, several leaves.
SHAPES = [(64, 128, 128, 1), (72, 96, 32, 1), (1, 32, 32, 1), (50, 512, 64, 4), (200, 1024, 128, 8), (33, 1152, 128, 1)]
ROW_COUNTS = [1, 3, 5, 12, 13, 31, 200]

each_kernels = pytest.mark.parametrize("kernels", KERNELS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def backend_for(kernels: str, dtype: torch.dtype) -> Backend:
    build_kernels()
    return get_backend(CPU, dtype, kernels)


def four_bits(
    num_rows: int, width: int, group: int, dtype: torch.dtype, *, seed: int = 0, is_ordered: bool = False
) -> QuantizedWeight:
    """A random weight that uses every level, and every zero point to 16."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 16, (num_rows, width), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 17, (num_rows, width // group), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_rows, width // group, generator=generator) * 0.1 + 1e-3
    order = torch.randperm(width, generator=generator) if is_ordered else None
    return QuantizedWeight(dtype, levels, scales, zeros, order)


def eight_bits(num_rows: int, width: int, dtype: torch.dtype) -> QuantizedWeight:
    levels = torch.randint(-128, 128, (num_rows, width), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
    return QuantizedWeight(dtype, levels, random(num_rows, 1, seed=2).abs() * 0.01)


# The definition.


def test_it_is_as_near_to_the_product_as_levels_of_a_row_can_be():
    """Each of a row's numbers is off by half a level of its group at most, and by no more than that is the product."""
    weight, hidden = four_bits(96, 640, 128, torch.float32), random(32, 640, seed=1)
    exact = hidden.double() @ weight.dequantize().double().T
    half_levels = hidden.unflatten(1, (5, 128)).abs().amax(2).double() / 127 / 2
    bound = half_levels @ weight.dequantize().double().abs().unflatten(1, (5, 128)).sum(2).T
    error = (linear_quantized(hidden, weight).double() - exact).abs()
    assert (error <= bound * 1.001).all()
    assert error.norm() / exact.norm() < 0.01


def test_rows_of_levels_give_exact_products():
    weight = four_bits(40, 256, 32, torch.float32)
    hidden = torch.randint(-127, 128, (7, 256), generator=torch.Generator().manual_seed(3)).float()
    hidden[:, ::32] = 127
    exact = hidden.double() @ weight.dequantize().double().T
    torch.testing.assert_close(linear_quantized(hidden, weight).double(), exact, rtol=1e-5, atol=1e-3)


def test_eight_bits_of_our_own_levels_are_our_own_product():
    weight, hidden = random(50, 128), random(9, 128, seed=1)
    levels, scales = quantize_rows(weight)
    given = QuantizedWeight(torch.float32, levels, scales[:, None])
    assert torch.equal(linear_quantized(hidden, given), linear_int8(hidden, weight))


# The kernels.


@each_kernels
@each_dtype
@pytest.mark.parametrize(("num_rows", "width", "group", "leaves"), SHAPES)
@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_the_bits_of_four_are_those_of_the_definition(
    kernels: str, dtype: torch.dtype, num_rows: int, width: int, group: int, leaves: int, is_ordered: bool
):
    backend, bias = backend_for(kernels, dtype), random(num_rows, dtype=dtype, seed=1)
    weight = four_bits(num_rows, width, group, dtype, is_ordered=is_ordered)
    packed = backend.pack_linear(weight, bias, LinearSpec(leaves=leaves))
    for count in ROW_COUNTS:
        hidden = random(count, width, dtype=dtype, seed=count)
        expected = linear_quantized(hidden, weight, leaves) + bias.float()
        assert torch.equal(backend.linear(hidden, packed, wide=True), expected)
        assert torch.equal(backend.linear(hidden, packed), expected.to(dtype))


@each_kernels
@each_dtype
@pytest.mark.parametrize(("num_rows", "width", "leaves"), [(64, 64, 1), (33, 6, 1), (50, 512, 4)])
def test_the_bits_of_eight_are_those_of_the_definition(
    kernels: str, dtype: torch.dtype, num_rows: int, width: int, leaves: int
):
    backend, weight = backend_for(kernels, dtype), eight_bits(num_rows, width, dtype)
    packed = backend.pack_linear(weight, spec=LinearSpec(leaves=leaves))
    assert torch.equal(packed.unpack()[0], weight.dequantize())
    for count in ROW_COUNTS:
        hidden = random(count, width, dtype=dtype, seed=count)
        assert torch.equal(backend.linear(hidden, packed, wide=True), linear_quantized(hidden, weight, leaves))


@each_kernels
@each_dtype
@pytest.mark.parametrize("half", [1, 16, 40])
def test_gates_and_ups_are_those_of_plain_products(kernels: str, dtype: torch.dtype, half: int):
    backend, weight = backend_for(kernels, dtype), four_bits(2 * half, 96, 32, dtype)
    bias, hidden = random(2 * half, dtype=dtype, seed=1), random(29, 96, dtype=dtype, seed=2)
    gates, ups = (linear_quantized(hidden, weight) + bias.float()).double().chunk(2, dim=1)
    packed = backend.pack_linear(weight, bias, LinearSpec(gated=True))
    tolerance = 2**-6 if dtype == torch.bfloat16 else 1e-5
    got = backend.linear(hidden, packed).double()
    torch.testing.assert_close(got, gates * gates.sigmoid() * ups, rtol=tolerance, atol=tolerance)
    assert torch.equal(packed.unpack()[0], weight.dequantize())


@each_kernels
def test_a_weight_is_given_back_as_it_was_given(kernels: str):
    for num_rows, width, group, _ in SHAPES:
        weight = four_bits(num_rows, width, group, torch.bfloat16, is_ordered=True)
        assert torch.equal(backend_for(kernels, torch.bfloat16).pack_linear(weight).unpack()[0], weight.dequantize())


def test_an_order_is_that_of_what_is_multiplied():
    """A weight whose columns stand in another order is the weight that it was made from."""
    plain = four_bits(40, 128, 128, torch.float32)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(5))
    moved = QuantizedWeight(torch.float32, plain.levels[:, order], plain.scales, plain.zeros, order)
    hidden = random(5, 128, seed=1)
    assert torch.equal(moved.dequantize(), plain.dequantize())
    assert torch.equal(linear_quantized(hidden, moved), linear_quantized(hidden, plain))


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
@each_dtype
@pytest.mark.parametrize("is_ordered", [False, True], ids=["plain", "ordered"])
def test_a_row_does_not_depend_on_its_batch(kernels: str, dtype: torch.dtype, is_ordered: bool):
    backend = backend_for(kernels, dtype)
    packed = backend.pack_linear(four_bits(200, 896, 128, dtype, is_ordered=is_ordered))
    hidden = random(401, 896, dtype=dtype, seed=1)
    expected = backend.linear(hidden, packed)
    for num_threads in (3, 1):
        backend.set_num_threads(num_threads)
        for count in (1, 2, 4, 5, 12, 13, 64, 193):
            parts = [backend.linear(part, packed) for part in hidden[: 5 * count].split(count)]
            assert torch.equal(torch.cat(parts), expected[: 5 * count])


@each_kernels
def test_the_largest_numbers_do_not_saturate(kernels: str):
    backend = backend_for(kernels, torch.float32)
    levels = torch.full((40, 128), 15, dtype=torch.uint8)
    scales, zeros = torch.ones(40, 1), torch.zeros(40, 1, dtype=torch.uint8)
    zeros[7], levels[7] = 16, 0
    weight = QuantizedWeight(torch.float32, levels, scales, zeros)
    hidden = torch.ones(2, 128)
    hidden[1] *= -1
    got = backend.linear(hidden, backend.pack_linear(weight))
    assert torch.equal(got, linear_quantized(hidden, weight))
    torch.testing.assert_close(got[:, 6:8], torch.tensor([[1920.0, -2048], [-1920, 2048]]))


@each_kernels
@each_dtype
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_no_numbers_and_touches_no_other(
    kernels: str, dtype: torch.dtype, strange: float
):
    backend = backend_for(kernels, dtype)
    packed = backend.pack_linear(four_bits(40, 96, 32, dtype))
    hidden = random(5, 96, dtype=dtype, seed=1)
    expected = backend.linear(hidden, packed)
    for place in (0, 33, 95):
        damaged = hidden.clone()
        damaged[2, place] = strange
        got = backend.linear(damaged, packed)
        assert got[2].isnan().all()
        assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
def test_four_bits_take_their_bytes_and_are_no_table(kernels: str):
    packed = backend_for(kernels, torch.bfloat16).pack_linear(four_bits(96, 256, 128, torch.bfloat16, is_ordered=True))
    assert not packed.is_table
    assert packed.num_bytes == 96 * 128 + 96 * 2 * 6 + 256 * 4


@pytest.mark.parametrize("kernels", INSTRUCTION_SETS)
def test_groups_that_a_leaf_would_cut_are_refused(kernels: str):
    with pytest.raises(ValueError, match="2 leaves of 384 inputs are no whole groups of one of 128, 64, 32: 128"):
        backend_for(kernels, torch.float32).pack_linear(
            four_bits(8, 384, 128, torch.float32), spec=LinearSpec(leaves=2)
        )


def test_kernels_for_gpus_refuse_it():
    backend_type = pytest.importorskip("blockyard_kernels.cuda.backend").CudaBackend
    backend = backend_type.__new__(backend_type)
    backend.name = "cuda"
    with pytest.raises(ValueError, match="has no products of weights that a checkpoint has quantized"):
        cast("Backend", backend).pack_linear(four_bits(8, 32, 32, torch.float32))
