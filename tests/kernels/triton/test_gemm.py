"""Products in Triton: their numbers, their order of summing, and what they read and write."""

from __future__ import annotations

import pytest
import torch

from blockyard_kernels.cuda.epilogue import PLAIN, Epilogue
from blockyard_kernels.cuda.gemm import multiply
from blockyard_kernels.cuda.launch_table import gemm_block_k
from blockyard_kernels.shapes import Activation, add_leaves
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES, IS_INTERPRETED

for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
GATED = Epilogue(gated=True, activation=Activation.SILU)
# Of outputs about as large as 1, rounded to the dtype.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def operands(rows: int, columns: int, features: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, a weight and a bias, the first two as views of wider tensors whose other columns are not numbers."""
    left = random(rows, features + 8, dtype=dtype)
    right = (random(columns, features + 16, seed=1) * features**-0.5).to(dtype)
    left[:, features:], right[:, features:] = torch.nan, torch.nan
    bias = random(columns, dtype=dtype, seed=2)
    return left.to(DEVICE)[:, :features], right.to(DEVICE)[:, :features], bias.to(DEVICE)


def exact(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return left.double() @ right.double().T + bias.double()


@for_dtypes
@pytest.mark.parametrize(
    ("rows", "columns", "features", "leaves"),
    [
        (1, 33, 70, 1),
        (16, 64, 128, 2),
        (17, 50, 304, 8),
        (33, 1, 24, 1),
        (70, 98, 160, 4),
        (3, 7, 16, 2),
        (2, 300, 8, 1),
    ],
)
def test_products_are_those_of_float64(dtype: torch.dtype, rows: int, columns: int, features: int, leaves: int):
    left, right, bias = operands(rows, columns, features, dtype)
    expected, tolerance = exact(left, right, bias), TOLERANCE[dtype]
    got = multiply(left, right, bias, leaves=leaves)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=2 * tolerance)
    wide = multiply(left, right, bias, leaves=leaves, dtype=torch.float32)
    torch.testing.assert_close(wide.double(), expected, rtol=2e-6, atol=4e-6)
    assert torch.equal(wide.to(dtype), got), "rounded once"
    plain = multiply(left, right, leaves=leaves, dtype=torch.float32)
    torch.testing.assert_close(plain.double(), expected - bias.double(), rtol=2e-6, atol=4e-6)
    if columns % 2 == 0:
        gate, up = expected.chunk(2, dim=1)
        gated = multiply(left, right, bias, leaves=leaves, epilogue=GATED)
        assert gated.shape == (rows, columns // 2)
        torch.testing.assert_close(gated.double(), gate * gate.sigmoid() * up, rtol=tolerance, atol=4 * tolerance)


def test_no_rows_have_no_products():
    left, right, bias = operands(0, 6, 16, DTYPES[0])
    assert multiply(left, right, bias, epilogue=GATED).shape == (0, 3)


@for_dtypes
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_row_has_the_same_bits_in_any_number_of_rows_and_at_any_place(dtype: torch.dtype, gated: bool):
    left, right, bias = operands(260, 34, 104, dtype)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        return multiply(rows, right, bias, leaves=4, epilogue=GATED if gated else PLAIN, dtype=torch.float32)

    whole = compute(left)
    for first, last in ((0, 1), (3, 5), (100, 112), (50, 67), (1, 41), (60, 260)):
        assert torch.equal(compute(left[first:last]), whole[first:last]), (first, last)
    assert torch.equal(compute(left.roll(7, 0)), whole.roll(7, 0))
    assert torch.equal(compute(left[9:10].expand(40, -1)), whole[9:10].expand(40, -1))
    if not gated:
        shards = [multiply(left, shard, leaves=4, dtype=torch.float32) for shard in right.split(17)]
        assert torch.equal(torch.cat(shards, 1), multiply(left, right, leaves=4, dtype=torch.float32))


@for_dtypes
@pytest.mark.parametrize("rows", [16, 32])
def test_larger_tiles_give_the_same_bits(dtype: torch.dtype, rows: int):
    """In the interpreter; on a GPU the instructions may be others, as the probe finds out."""
    left, right, bias = operands(rows, 66, 200, dtype)
    tiled, uniform = (multiply(left, right, bias, leaves=2, uniform=uniform) for uniform in (False, True))
    tolerance = 0 if IS_INTERPRETED else TOLERANCE[dtype]
    torch.testing.assert_close(uniform, tiled, rtol=tolerance, atol=tolerance)


@for_dtypes
@pytest.mark.parametrize("leaves", [2, 4, 8])
def test_leaves_are_added_as_the_tree_does_on_any_number_of_ranks(dtype: torch.dtype, leaves: int):
    left, right, _ = operands(19, 40, 40 * leaves, dtype)
    whole = multiply(left, right, leaves=leaves, dtype=torch.float32)
    for ranks in (2, 4, 8):
        if ranks > leaves:
            continue
        width = left.shape[1] // ranks
        pairs = zip(left.split(width, 1), right.split(width, 1), strict=True)
        shares = [multiply(*pair, leaves=leaves // ranks, dtype=torch.float32) for pair in pairs]
        assert torch.equal(add_leaves(shares), whole), ranks
    assert not torch.equal(multiply(left, right, dtype=torch.float32), whole)


def test_steps_along_a_leaf_go_by_its_length_alone():
    assert [gemm_block_k(2, features) for features in (1792, 192, 96, 1376, 40)] == [64, 64, 32, 32, 32]
    assert gemm_block_k(4, 512) == 32


@for_dtypes
def test_nothing_past_the_result_is_written_and_all_of_it_is(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    buffers: list[torch.Tensor] = []
    plain = torch.Tensor.new_empty

    def new_empty(self: torch.Tensor, *sizes: int, **options: object) -> torch.Tensor:
        if len(sizes) == 1:
            return plain(self, *sizes, **options)  # the interpreter's own
        buffers.append(plain(self, sizes[0] + 2, sizes[1], **options).fill_(torch.inf))
        return buffers[-1][1:-1].fill_(torch.nan)

    left, right, bias = operands(35, 34, 40, dtype)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    for gated in (False, True):
        assert multiply(left, right, bias, epilogue=GATED if gated else PLAIN).isfinite().all()
        assert buffers[-1][[0, -1]].isinf().all()


@for_dtypes
def test_rows_may_lie_further_apart_than_32_bits_reach(dtype: torch.dtype):
    """Of the memory only what is written is there, on a processor."""
    stride = 2**30
    far = torch.empty(2 * stride + 200, dtype=dtype, device=DEVICE)
    left, right = (far.as_strided((3, 64), (stride, 1), offset) for offset in (0, 100))
    near = random(3, 64, dtype=dtype).to(DEVICE), random(3, 64, dtype=dtype, seed=1).to(DEVICE)
    left.copy_(near[0])
    right.copy_(near[1])
    assert torch.equal(multiply(left, right), multiply(*near))
