"""Products in 8 bits: int8 gives the bits of its definition, by any tile; weights in e4m3 give its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.cuda import linear as linear_module
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.cuda.linear import CudaLinear, Method, Way
from blockyard_kernels.cuda.quantized import FP8, INT8, MAX_INT8_FEATURES, quantize
from blockyard_kernels.reference import fp8, int8
from blockyard_kernels.reference.elementwise import activate_and_mul
from blockyard_kernels.shapes import Activation, LinearSpec, add_leaves
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES

if TYPE_CHECKING:
    from blockyard_kernels.cuda.quantized import Format

for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
for_formats = pytest.mark.parametrize("eight_bits", [INT8, FP8], ids=["int8", "fp8"])


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().contiguous().view(torch.uint8)


@for_dtypes
@for_formats
@pytest.mark.parametrize(("features", "leaves"), [(40, 1), (304, 8), (96, 2)])
def test_rows_are_quantized_as_defined(eight_bits: Format, dtype: torch.dtype, features: int, leaves: int):
    rows = random(9, features + 3, dtype=dtype)[:, 3:]
    rows[1], rows[2], rows[3], rows[4, 0] = 0, rows[2] * 1e-3, rows[3] * 100, 3e4
    # Halves, of which rounding up would show.
    rows[5] = torch.arange(features).remainder(254) / 2
    rows[5, :: features // leaves] = 127
    made = quantize(rows.to(DEVICE), eight_bits, leaves)
    values, scales = made.values, made.scales
    assert values.shape == rows.shape
    define = int8.quantize_rows if eight_bits is INT8 else fp8.quantize_rows
    for leaf, part in enumerate(rows.chunk(leaves, 1)):
        expected, expected_scales = define(part)
        assert torch.equal(scales[:, leaf].cpu(), expected_scales)
        assert torch.equal(bits(values.chunk(leaves, 1)[leaf]), bits(expected))
    assert quantize(rows[:0].to(DEVICE), eight_bits, leaves).scales.shape == (0, leaves)


@pytest.mark.parametrize(
    ("dtype", "rows", "features", "leaves"),
    [
        (torch.float32, 1, 192, 1),
        (torch.bfloat16, 3, 200, 4),
        (torch.float16, 19, 200, 1),
        (torch.float32, 35, 160, 2),
    ],
)
def test_products_in_int8_are_the_bits_of_the_definition(dtype: torch.dtype, rows: int, features: int, leaves: int):
    weight, bias = (random(34, features, seed=1) * features**-0.5).to(dtype), random(34, dtype=dtype, seed=2)
    hidden = random(rows, features + 8, dtype=dtype)[:, :features]
    for added in (None, bias):
        expected = int8.linear_int8(hidden, weight, added, leaves)
        on_device = None if added is None else added.to(DEVICE)
        linear = CudaLinear(weight.to(DEVICE), on_device, LinearSpec(leaves=leaves), eight_bits=INT8)
        assert torch.equal(linear(hidden.to(DEVICE), wide=True).cpu(), expected)
        assert torch.equal(linear(hidden.to(DEVICE)).cpu(), expected.to(dtype))
        linear.way = Way(Method.UNIFORM)
        assert torch.equal(linear(hidden.to(DEVICE), wide=True).cpu(), expected)
    spec = LinearSpec(gated=True, activation=Activation.GELU_TANH, leaves=leaves)
    gated = CudaLinear(weight.to(DEVICE), bias.to(DEVICE), spec, eight_bits=INT8)
    got = gated(hidden.to(DEVICE), wide=True).cpu()
    torch.testing.assert_close(got, activate_and_mul(expected, Activation.GELU_TANH), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "rows", "leaves"), [(torch.bfloat16, 3, 1), (torch.float16, 19, 4), (torch.float32, 70, 2)]
)
def test_products_by_weights_in_fp8_are_the_definition_s(dtype: torch.dtype, rows: int, leaves: int):
    weight, bias = (random(48, 192, seed=1) * 192**-0.5).to(dtype), random(48, dtype=dtype, seed=2)
    hidden = random(rows, 192, dtype=dtype)
    expected = fp8.linear_fp8(hidden, weight, bias, leaves)
    linear = CudaLinear(weight.to(DEVICE), bias.to(DEVICE), LinearSpec(leaves=leaves), eight_bits=FP8)
    got = linear(hidden.to(DEVICE), wide=True).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear(hidden.to(DEVICE)).cpu(), got.to(dtype))
    gated = CudaLinear(weight.to(DEVICE), bias.to(DEVICE), LinearSpec(leaves=leaves, gated=True), eight_bits=FP8)
    gate, up = expected.chunk(2, 1)
    got = gated(hidden.to(DEVICE), wide=True).cpu()
    torch.testing.assert_close(got, gate * gate.sigmoid() * up, rtol=1e-4, atol=1e-5)


@for_formats
def test_weights_take_a_byte_each_and_are_no_table(eight_bits: Format):
    weight, bias = random(24, 64, dtype=torch.bfloat16).to(DEVICE), random(24, dtype=torch.bfloat16).to(DEVICE)
    linear = CudaLinear([weight[:8], weight[8:]], bias, LinearSpec(leaves=2), eight_bits=eight_bits)
    assert linear.num_bytes == 24 * 64 + 24 * 2 * 4 + 24 * 2
    assert not linear.is_table


@for_formats
def test_rows_keep_their_bits_and_ranks_come_to_those_of_one(eight_bits: Format):
    weight, hidden = random(17, 160, seed=1).to(DEVICE), random(40, 160).to(DEVICE)
    whole = CudaLinear(weight, None, LinearSpec(leaves=4), eight_bits=eight_bits)
    whole.way = Way(Method.TILED)
    expected = whole(hidden)
    for first, last in ((0, 1), (3, 20)):
        assert torch.equal(whole(hidden[first:last]), expected[first:last])
    for ranks in (2, 4):
        sums: list[torch.Tensor] = []
        for part, rows in zip(weight.chunk(ranks, 1), hidden.chunk(ranks, 1), strict=True):
            share = CudaLinear(part, None, LinearSpec(leaves=4 // ranks, partial=True), eight_bits=eight_bits)
            share.way = whole.way
            sums.append(share(rows))
        assert torch.equal(add_leaves(sums), expected)


@for_formats
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_no_number_and_leaves_the_others(eight_bits: Format, value: float):
    weight, hidden = random(16, 64, seed=1), random(20, 64)
    hidden[7, 33] = value
    linear = CudaLinear(weight.to(DEVICE), None, eight_bits=eight_bits)
    finite = linear(hidden.to(DEVICE)).isfinite().cpu()
    assert not finite[7].any()
    assert finite[[row for row in range(20) if row != 7]].all()


def test_zeros_and_the_smallest_numbers_give_the_bias():
    bias = random(16)
    linear = CudaLinear(random(16, 64, seed=1).to(DEVICE), bias.to(DEVICE), eight_bits=INT8)
    hidden = torch.stack([torch.zeros(64), torch.full((64,), 1e-38)])
    assert torch.equal(linear(hidden.to(DEVICE)).cpu(), bias.expand(2, 16))


def test_sums_of_the_largest_bytes_stay_whole_and_longer_ones_are_refused():
    width = MAX_INT8_FEATURES
    hidden, weight = torch.ones(2, width, device=DEVICE), torch.ones(16, width, device=DEVICE)
    hidden[1] *= -1
    got = CudaLinear(weight, None, eight_bits=INT8)(hidden).cpu()
    assert got[:, 0].tolist() == [width, -width]
    with pytest.raises(ValueError, match=f"at most {width} in int8, not {width + 1}"):
        CudaLinear(torch.empty(1, width + 1), None, eight_bits=INT8)


def test_a_backend_multiplies_as_it_is_told():
    """Leaves are a part of the definition, and summed apart only where bits are promised."""
    weight, hidden = random(32, 64, dtype=torch.float16, seed=1), random(3, 64, dtype=torch.float16)
    for invariant, leaves in ((False, 1), (True, 2)):
        backend = CudaBackend(DEVICE, invariant=invariant, quantization="int8")
        packed = backend.pack_linear([weight[:8].to(DEVICE), weight[8:].to(DEVICE)], spec=LinearSpec(leaves=2))
        got = backend.linear(hidden.to(DEVICE), packed, wide=True).cpu()
        assert torch.equal(got, int8.linear_int8(hidden, weight, leaves=leaves))
    assert backend.name == "cuda/invariant/int8"
    assert CudaBackend(DEVICE, quantization="fp8").name == "cuda/fp8"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["rms", "wide rms", "layer"])
def test_a_norm_quantizes_what_is_multiplied_next(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    weight, hidden = random(16, 200, dtype=dtype, seed=1), random(5, 200, dtype=dtype)
    hidden[3, 7] = torch.inf
    backend = CudaBackend(DEVICE, quantization="int8")
    packed = backend.pack_linear(weight.to(DEVICE))
    by = random(200, dtype=dtype if kind == "rms" else torch.float32, seed=2).to(DEVICE)
    if kind == "layer":
        normed, _ = backend.layer_norm(hidden.to(DEVICE), by, by, 1e-5)
    else:
        normed, _ = backend.rms_norm(hidden.to(DEVICE), by, 1e-5)
    expected = int8.linear_int8(normed.cpu(), weight)
    assert expected.isnan().any(1).tolist() == [False, False, False, True, False]
    others = backend.linear(normed.clone(), packed, wide=True).cpu()
    monkeypatch.setattr(linear_module, "quantize", None)
    for got in (others, backend.linear(normed, packed, wide=True).cpu()):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
