"""Products in int8: every instruction set gives the bits of the definition, and a row's do not depend on its batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch

from blockyard_kernels.cpu.quantized import MAX_IN_FEATURES, Int8Linear
from blockyard_kernels.reference.int8 import linear_int8, quantize_rows
from blockyard_kernels.select import get_backend
from blockyard_kernels.shapes import Activation, LinearSpec, LogitTransform
from tests.kit.kernels.backends import INSTRUCTION_SETS, build_kernels
from tests.kit.kernels.random_tensors import random

if TYPE_CHECKING:
    from blockyard_kernels.cpu.backend import CpuBackend

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
# (outputs, inputs): whole panels and parts of one, words that are not full, fewer outputs than a vector has lanes.
SHAPES = [(64, 64), (72, 48), (33, 5), (1, 1), (16, 3), (200, 320), (50, 1027)]
ROW_COUNTS = [1, 2, 5, 12, 13, 31, 200]

each_instruction_set = pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def backend_for(instruction_set: str, dtype: torch.dtype) -> CpuBackend:
    build_kernels()
    return cast("CpuBackend", get_backend(CPU, dtype, instruction_set, "int8"))


# The definition.


def test_a_row_is_quantized_by_its_largest_magnitude():
    levels, scales = quantize_rows(torch.tensor([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [254.0, 1.0, 3.0]]))
    assert levels.tolist() == [[64, -127, 32], [0, 0, 0], [127, 0, 2]]
    assert scales.tolist() == pytest.approx([2 / 127, 0, 2])


def test_halves_are_rounded_to_even():
    levels, _ = quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]]))
    assert levels.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_rows_too_small_for_an_inverse_are_zeros():
    levels, scales = quantize_rows(torch.tensor([[1e-38, -1e-38]]))
    assert levels.tolist() == [[0, 0]]
    assert scales.isfinite().all()


def test_it_is_near_the_product():
    hidden, weight = random(32, 640), random(96, 640, seed=1)
    exact = hidden.double() @ weight.double().T
    error = (linear_int8(hidden, weight) - exact).norm() / exact.norm()
    assert 0.001 < error < 0.015


# The kernels.


@each_instruction_set
@each_dtype
@pytest.mark.parametrize(("num_outputs", "width"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_bits_are_those_of_the_definition(
    instruction_set: str, dtype: torch.dtype, num_outputs: int, width: int, has_bias: bool
):
    backend = backend_for(instruction_set, dtype)
    weight = random(num_outputs, width, dtype=dtype)
    bias = random(num_outputs, dtype=dtype, seed=1) if has_bias else None
    packed = backend.pack_linear(weight, bias)
    for num_rows in ROW_COUNTS:
        hidden = random(num_rows, width, dtype=dtype, seed=num_rows)
        expected = linear_int8(hidden, weight, bias)
        assert torch.equal(backend.linear(hidden, packed, wide=True), expected)
        assert torch.equal(backend.linear(hidden, packed), expected.to(dtype))


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("half", [1, 16, 40, 344])
def test_gates_and_ups_are_those_of_plain_products(instruction_set: str, dtype: torch.dtype, half: int):
    backend = backend_for(instruction_set, dtype)
    weight, bias = random(2 * half, 75, dtype=dtype), random(2 * half, dtype=dtype, seed=1)
    hidden = random(29, 75, dtype=dtype, seed=2)
    gates, ups = linear_int8(hidden, weight, bias).double().chunk(2, dim=1)
    got = backend.linear(hidden, backend.pack_linear(weight, bias, LinearSpec(gated=True)))
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), gates * gates.sigmoid() * ups, rtol=tolerance, atol=tolerance)


@each_instruction_set
@each_dtype
def test_products_are_activated_and_logits_capped(instruction_set: str, dtype: torch.dtype):
    backend = backend_for(instruction_set, dtype)
    weight, bias, hidden = random(49, 75, dtype=dtype), random(49, dtype=dtype, seed=1), random(29, 75, dtype=dtype)
    sums = linear_int8(hidden, weight, bias)
    activated = backend.linear(hidden, backend.pack_linear(weight, bias, LinearSpec(activation=Activation.RELU)))
    assert torch.equal(activated, sums.relu().to(dtype))
    capped = backend.linear(
        hidden, backend.pack_linear(weight, bias, LinearSpec(logits=LogitTransform(0.5, 3.0))), wide=True
    )
    torch.testing.assert_close(capped, torch.tanh(sums / 6) * 3)


@each_instruction_set
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_weight_is_given_back_as_it_was_rounded(instruction_set: str, gated: bool):
    for num_rows, width, leaves in ((34, 5, 1), (100, 64, 4), (64, 1027, 1)):
        weight = random(num_rows, width, dtype=torch.bfloat16)
        packed = backend_for(instruction_set, torch.bfloat16).pack_linear(
            weight, spec=LinearSpec(gated=gated, leaves=leaves)
        )
        levels, scales = quantize_rows(weight.float().view(num_rows * leaves, -1))
        rounded = (levels * scales[:, None]).view(num_rows, width)
        assert torch.equal(packed.unpack()[0], rounded)


@each_instruction_set
@each_dtype
def test_a_row_does_not_depend_on_its_batch(instruction_set: str, dtype: torch.dtype):
    backend = backend_for(instruction_set, dtype)
    packed = backend.pack_linear(random(200, 896, dtype=dtype))
    hidden = random(401, 896, dtype=dtype, seed=1)
    expected = backend.linear(hidden, packed)
    for num_threads in (3, 1):
        backend.set_num_threads(num_threads)
        for count in (1, 2, 3, 7, 12, 13, 64, 193):
            parts = [backend.linear(part, packed) for part in hidden[: 5 * count].split(count)]
            assert torch.equal(torch.cat(parts), expected[: 5 * count])


@each_instruction_set
def test_the_largest_bytes_do_not_saturate(instruction_set: str):
    """Two products of the largest bytes are more than 16 bits hold, and those of the longest row almost what 32 do."""
    backend, width = backend_for(instruction_set, torch.float32), MAX_IN_FEATURES
    hidden, weight = torch.ones(3, width), torch.ones(40, width)
    hidden[1] *= -1
    weight[7] *= -1
    got = backend.linear(hidden, backend.pack_linear(weight))
    assert torch.equal(got, linear_int8(hidden, weight))
    assert got[:2, 6:8].tolist() == [[width, -width], [-width, width]]


@each_instruction_set
@each_dtype
@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_no_numbers_and_touches_no_other(
    instruction_set: str, dtype: torch.dtype, strange: float
):
    backend = backend_for(instruction_set, dtype)
    packed = backend.pack_linear(random(40, 70, dtype=dtype))
    hidden = random(5, 70, dtype=dtype, seed=1)
    expected = backend.linear(hidden, packed)
    for place in (0, 33, 69):
        damaged = hidden.clone()
        damaged[2, place] = strange
        got = backend.linear(damaged, packed)
        assert got[2].isnan().all()
        assert torch.equal(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@each_instruction_set
@each_dtype
def test_zeros_and_the_smallest_numbers_give_the_bias(instruction_set: str, dtype: torch.dtype):
    backend = backend_for(instruction_set, dtype)
    bias = random(40, dtype=dtype)
    packed = backend.pack_linear(random(40, 70, dtype=dtype), bias)
    hidden = torch.stack([torch.zeros(70), torch.full((70,), 1e-38)]).to(dtype)
    assert torch.equal(backend.linear(hidden, packed), bias.expand(2, 40))


@each_instruction_set
def test_rows_may_be_strided(instruction_set: str):
    backend = backend_for(instruction_set, torch.bfloat16)
    packed = backend.pack_linear(random(40, 64, dtype=torch.bfloat16))
    wide = random(9, 200, dtype=torch.bfloat16, seed=1)
    assert torch.equal(backend.linear(wide[:, 32:96], packed), backend.linear(wide[:, 32:96].contiguous(), packed))
    assert backend.linear(wide[:0, :64], packed).shape == (0, 40)


@each_instruction_set
def test_weights_take_a_byte_each_and_are_no_table(instruction_set: str):
    backend = backend_for(instruction_set, torch.bfloat16)
    packed = backend.pack_linear(random(96, 50, dtype=torch.bfloat16), random(96, dtype=torch.bfloat16))
    assert isinstance(packed, Int8Linear)
    assert not packed.is_table
    assert packed.num_bytes == 96 * 52 + 96 * 4 + 96 * 4 + 96 * 2


@each_instruction_set
def test_what_integers_cannot_sum_is_refused(instruction_set: str):
    with pytest.raises(ValueError, match="in_features must be at most 131072 in int8, not 131073"):
        backend_for(instruction_set, torch.float32).pack_linear(torch.empty(1, 131_073))


# The choice.


@pytest.mark.parametrize(
    ("dtype", "cpu_kernels", "told"),
    [
        (torch.bfloat16, "reference", "this is bfloat16 on cpu, kernels: reference"),
        (torch.float16, "auto", "this is float16 on cpu, kernels: auto"),
    ],
)
def test_kernels_that_lack_it_refuse_it(dtype: torch.dtype, cpu_kernels: str, told: str):
    with pytest.raises(ValueError, match=f"int8 needs the kernels for x86-64.*{told}"):
        get_backend(CPU, dtype, cpu_kernels, "int8")


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_a_gpu_without_our_kernels_refuses_it(quantization: str):
    with pytest.raises(ValueError, match=rf"{quantization} needs.* a GPU with our kernels; this is bfloat16 on cuda"):
        get_backend(torch.device("cuda"), torch.bfloat16, "reference", quantization)


def test_a_processor_refuses_fp8():
    with pytest.raises(ValueError, match="fp8 needs a GPU with our kernels; this is bfloat16 on cpu"):
        get_backend(CPU, torch.bfloat16, "auto", "fp8")


def test_an_unknown_quantization_is_refused():
    with pytest.raises(ValueError, match="no quantization 'int4'; known are none, int8, fp8"):
        get_backend(CPU, torch.bfloat16, "auto", "int4")


@each_instruction_set
def test_its_name_tells_it_apart(instruction_set: str):
    assert get_backend(CPU, torch.bfloat16, instruction_set).name == f"cpu/{instruction_set}"
    assert backend_for(instruction_set, torch.bfloat16).name == f"cpu/{instruction_set}/int8"
