"""A GPU's linear layers: their numbers by every way, and the ladder, held against products that depend on the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from blockyard_kernels.cuda import linear as linear_module
from blockyard_kernels.cuda.backend import CudaBackend
from blockyard_kernels.cuda.linear import FAST, LADDER, CudaLinear, Method, Way, settle
from blockyard_kernels.cuda.quantized import INT8
from blockyard_kernels.reference.int8 import quantize_rows
from blockyard_kernels.shapes import LinearSpec, add_leaves
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.row_dependent import by_pairs, in_order
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard_kernels.cuda.quantized import Format

    # (rows, weight) -> whether the product is summed in another order.
    Differs = Callable[[torch.Tensor, torch.Tensor], bool]

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
WAYS = [FAST, LADDER[0], Way(Method.TILED), Way(Method.UNIFORM)]


def make_linear(
    columns: int, features: int, dtype: torch.dtype, *, bias: bool = True, eight_bits: Format | None = None, **spec: Any
) -> CudaLinear:
    weight = (random(columns, features, seed=1) * features**-0.5).to(dtype)
    added = random(columns, dtype=dtype, seed=2).to(DEVICE) if bias else None
    return CudaLinear(weight.to(DEVICE), added, LinearSpec(**spec), eight_bits=eight_bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.method)
def test_every_way_gives_the_products_of_float64(way: Way, dtype: torch.dtype):
    rows = random(19, 48, dtype=dtype).to(DEVICE)
    for bias in (False, True):
        plain, gated = make_linear(34, 40, dtype, bias=bias), make_linear(34, 40, dtype, bias=bias, gated=True)
        plain.way = gated.way = way
        expected = rows[:, 8:].double() @ plain.weight.double().T
        if bias:
            assert plain.bias is not None
            expected = expected + plain.bias.double()
        tolerance = TOLERANCE[dtype]
        got = plain(rows[:, 8:])
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=2 * tolerance)
        gate, up = expected.chunk(2, 1)
        got = gated(rows[:, 8:])
        torch.testing.assert_close(got.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=4 * tolerance)
    assert plain(rows[:0, 8:]).shape == (0, 34)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wide_products_are_not_rounded(dtype: torch.dtype):
    linear, rows = make_linear(34, 40, dtype), random(19, 40, dtype=dtype).to(DEVICE)
    assert linear.bias is not None
    for linear.way in (Way(Method.TILED), *([FAST, LADDER[0]] if DEVICE.type == "cuda" else [])):
        wide = linear(rows, wide=True)
        expected = rows.double() @ linear.weight.double().T + linear.bias.double()
        torch.testing.assert_close(wide.double(), expected, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_come_to_the_bits_of_one(dtype: torch.dtype):
    whole, rows = make_linear(20, 128, dtype, leaves=8), random(21, 128, dtype=dtype).to(DEVICE)
    expected = whole(rows)
    for ranks in (2, 4, 8):
        shares = [
            CudaLinear(part, whole.bias, LinearSpec(leaves=8 // ranks, partial=True))
            for part in whole.weight.chunk(ranks, 1)
        ]
        for share in shares:
            share.way = Way(Method.TILED)
        sums = [share(part) for share, part in zip(shares, rows.chunk(ranks, 1), strict=True)]
        assert torch.equal(shares[0].finished(add_leaves(sums)), expected), ranks


def library(differs: Differs) -> Callable[..., torch.Tensor]:
    """Makes a product that is summed in another order where it differs."""

    def product(rows: torch.Tensor, weight: torch.Tensor, *, wide: bool) -> torch.Tensor:
        multiply = by_pairs if differs(rows, weight) else in_order
        result = multiply(rows.float(), weight.float())
        return result if wide else result.to(rows.dtype)

    return product


@pytest.mark.parametrize(
    ("differs", "way"),
    [
        (lambda rows, weight: False, Way(Method.PADDED, 16)),
        (lambda rows, weight: len(rows) < 64, Way(Method.PADDED, 64)),
        (lambda rows, weight: len(rows) == 128, Way(Method.TILED)),
        (lambda rows, weight: len(weight) < 32, Way(Method.TILED)),
    ],
    ids=["never", "few rows", "some rows", "few columns"],
)
def test_the_library_serves_where_its_rows_and_columns_keep_their_bits(
    monkeypatch: pytest.MonkeyPatch, differs: Differs, way: Way
):
    monkeypatch.setattr(linear_module, "library_product", library(differs))
    linears = [make_linear(32, 24, torch.float32) for _ in range(2)]
    assert settle(linears)
    assert [linear.way for linear in linears] == [way, way]


def test_our_kernel_serves_in_one_tile_or_not_at_all(monkeypatch: pytest.MonkeyPatch):
    """As where tiles of few rows are multiplied by other instructions than tiles of many."""
    sure: list[bool] = []

    def multiply(rows: torch.Tensor, weight: torch.Tensor, bias: object, *, uniform: bool, **rest: object):
        assert bias is None
        wrong = len(rows) <= 16 and not (uniform and sure)
        return (by_pairs if wrong else in_order)(rows.float(), weight.float())

    monkeypatch.setattr(linear_module, "library_product", library(lambda rows, weight: len(rows) > 256))
    monkeypatch.setattr(linear_module, "multiply", multiply)
    linears = [make_linear(64, 24, torch.float32, gated=True), make_linear(32, 24, torch.float32)]
    assert not settle(linears)
    assert [linear.way for linear in linears] == [FAST, FAST]
    sure.append(True)
    assert settle(linears)
    assert [linear.way for linear in linears] == [Way(Method.UNIFORM)] * 2


@pytest.mark.parametrize("options", [{"leaves": 2}, {"partial": True}, {"eight_bits": INT8}], ids=str)
def test_a_library_never_makes_what_must_be_a_tree(options: dict[str, Any]):
    linear = make_linear(16, 32, torch.float16, **options)
    assert [way.method for way in LADDER if linear.takes(way)] == [Method.TILED, Method.UNIFORM]


def test_a_weight_comes_whole_or_in_parts():
    parts = [random(6, 16), random(10, 16, seed=1)]
    whole = CudaLinear(parts, None)
    assert torch.equal(whole.weight, torch.cat(parts))
    assert (whole.in_features, whole.out_features, whole.is_table, whole.num_bytes) == (16, 16, True, 16 * 16 * 4)
    assert CudaLinear(parts, None, LinearSpec(gated=True)).out_features == 8


def test_a_weight_is_given_back_as_it_is_held():
    linear = make_linear(16, 32, torch.float32)
    weight, bias = linear.unpack()
    assert torch.equal(weight, linear.weight)
    assert weight.data_ptr() != linear.weight.data_ptr()
    assert linear.bias is not None
    assert bias is not None
    assert torch.equal(bias, linear.bias)
    rounded, _ = make_linear(16, 32, torch.float32, leaves=2, eight_bits=INT8).unpack()
    levels, scales = quantize_rows(linear.weight.cpu().view(32, 16))
    assert torch.equal(rounded.cpu(), (levels * scales[:, None]).view(16, 32))


def test_the_library_adds_in_float32() -> None:
    """Partial sums in half precision would make a product depend on how the library splits it."""
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    CudaBackend(DEVICE)
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction
