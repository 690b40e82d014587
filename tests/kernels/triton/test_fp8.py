"""Products in 8-bit floating point: quantized as the definition says, and summed in one order."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda import fp8
from kernels.cuda.epilogue import finish
from kernels.cuda.linear import MIN_LIBRARY_FP8_ROWS, CudaLinear, Method, Way
from kernels.leaves import add_leaves
from kernels.reference.fp8 import linear_fp8, quantize_rows
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES

for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


@for_dtypes
@pytest.mark.parametrize(("features", "leaves"), [(40, 1), (304, 8), (96, 2)])
def test_rows_are_quantized_as_defined(dtype: torch.dtype, features: int, leaves: int):
    rows = random(9, features + 3, dtype=dtype)[:, 3:]
    rows[1], rows[2], rows[3], rows[4, 0] = 0, rows[2] * 1e-3, rows[3] * 100, 3e4
    values, scales = fp8.quantize(rows.to(DEVICE), leaves)
    assert values.shape == rows.shape
    for leaf, part in enumerate(rows.chunk(leaves, 1)):
        expected, expected_scales = quantize_rows(part)
        assert torch.equal(scales[:, leaf].cpu(), expected_scales)
        assert torch.equal(bits(values.chunk(leaves, 1)[leaf].cpu().contiguous()), bits(expected))
    assert fp8.quantize(rows[:0].to(DEVICE), leaves)[1].shape == (0, leaves)


@pytest.mark.parametrize(
    ("dtype", "rows", "leaves"),
    [
        (torch.bfloat16, 3, 1),
        (torch.bfloat16, MIN_LIBRARY_FP8_ROWS + 2, 1),
        (torch.float16, MIN_LIBRARY_FP8_ROWS + 2, 4),
        (torch.float32, 3, 2),
    ],
)
def test_products_are_the_definition_s(dtype: torch.dtype, rows: int, leaves: int):
    """Few rows by our kernel, more in one leaf by the library."""
    weight, bias = (random(48, 192, seed=1) * 192**-0.5).to(dtype), random(48, dtype=dtype, seed=2)
    hidden = random(rows, 192, dtype=dtype)
    expected = linear_fp8(hidden, weight, bias, leaves)
    linear = CudaLinear(weight.to(DEVICE), bias.to(DEVICE), leaves=leaves, eight_bits=True)
    got = linear(hidden.to(DEVICE), wide=True).cpu()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(linear(hidden.to(DEVICE)).cpu(), got.to(dtype))
    gated = CudaLinear(weight.to(DEVICE), bias.to(DEVICE), leaves=leaves, eight_bits=True, gated=True)
    gate, up = expected.chunk(2, 1)
    torch.testing.assert_close(
        gated(hidden.to(DEVICE), wide=True).cpu(), gate * gate.sigmoid() * up, rtol=1e-4, atol=1e-5
    )
    assert not linear.is_table


def test_long_sums_of_the_library_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fp8, "MAX_LIBRARY_FEATURES", 64)
    seen: list[int] = []
    plain = torch._scaled_mm

    def scaled_mm(left: torch.Tensor, *rest: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append(left.shape[1])
        return plain(left, *rest, **options)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    hidden, weight = random(32, 160), random(16, 160, seed=1)
    got = CudaLinear(weight.to(DEVICE), None, eight_bits=True)(hidden.to(DEVICE))
    torch.testing.assert_close(got.cpu(), linear_fp8(hidden, weight), rtol=1e-5, atol=1e-4)
    assert seen == [64, 64, 32]


def test_rows_keep_their_bits_and_ranks_come_to_those_of_one():
    weight, hidden = random(17, 160, seed=1).to(DEVICE), random(40, 160).to(DEVICE)
    whole = CudaLinear(weight, None, leaves=4, eight_bits=True)
    whole.way = Way(Method.TILED)
    expected = whole(hidden)
    for first, last in ((0, 1), (3, 20)):
        assert torch.equal(whole(hidden[first:last]), expected[first:last])
    for ranks in (2, 4):
        sums: list[torch.Tensor] = []
        for part, rows in zip(weight.chunk(ranks, 1), hidden.chunk(ranks, 1), strict=True):
            share = CudaLinear(part, None, leaves=4 // ranks, partial=True, eight_bits=True)
            share.way = whole.way
            sums.append(share(rows))
        assert torch.equal(add_leaves(sums), expected)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_gives_no_number_and_leaves_the_others(value: float):
    weight, hidden = random(16, 64, seed=1), random(20, 64)
    hidden[7, 33] = value
    linear = CudaLinear(weight.to(DEVICE), None, eight_bits=True)
    for count in (10, 20):
        finite = linear(hidden[:count].to(DEVICE)).isfinite().cpu()
        assert not finite[7].any()
        assert finite[[row for row in range(count) if row != 7]].all()


@for_dtypes
def test_what_follows_a_product_is_done_in_float32_and_rounded_once(dtype: torch.dtype):
    sums, bias = random(5, 2050).to(DEVICE), random(2050, dtype=dtype, seed=1).to(DEVICE)
    scales = random(5, seed=2).to(DEVICE), random(2050, seed=3).to(DEVICE)
    expected = sums * scales[0][:, None] * scales[1] + bias.float()
    assert torch.equal(finish(sums, bias, dtype=dtype, scales=scales), expected.to(dtype))
    gate, up = expected.chunk(2, 1)
    got = finish(sums, bias, dtype=torch.float32, scales=scales, gated=True)
    torch.testing.assert_close(got, gate * gate.sigmoid() * up, rtol=1e-5, atol=1e-5)
    assert finish(sums[:0], bias, dtype=dtype).shape == (0, 2050)
