"""Norms and sums of rows in Triton: the reference's bits, and not a byte beside what they are to write."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.cuda.rows import norms
from blockyard_kernels.reference import elementwise as reference
from tests.kit.kernels.exact_numbers import assert_equal_bits, assert_one_rounding, balanced_eighths
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    # From rows to what the kernel makes of them, and the reference.
    Op = Callable[[Tensor], tuple[Tensor, Tensor]]

for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
EPSILON = 1e-5
SUMS = [(False, 1.0), (True, 1.0), (True, 0.5)]
"""Whether there is a residual, and the factor of what is added to it, of which sums stay exact."""


def there(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


def make_ops(width: int, dtype: torch.dtype) -> list[Op]:
    """Norms by all kinds of weights, with and without what they are added to."""
    wide, bias = random(width, seed=2), random(width, seed=3)
    added = balanced_eighths(5, width, dtype=dtype, seed=1)
    ops: list[Op] = []
    for weight, (is_added, scale) in product([None, wide, wide.to(dtype)], SUMS):
        residual = added if is_added else None

        def rms_norm(rows: Tensor, weight=weight, residual=residual, scale=scale) -> tuple[Tensor, Tensor]:
            normed, total, _ = norms.norm(rows.to(DEVICE), there(weight), EPSILON, there(residual), scale)
            expected = reference.rms_norm(rows, weight, EPSILON, residual, scale)
            assert_equal_bits(total, expected[1])
            return normed, expected[0]

        def add_normed(rows: Tensor, weight=weight, scale=scale) -> tuple[Tensor, Tensor]:
            got = norms.add_normed(rows.to(DEVICE), there(weight), EPSILON, added.to(DEVICE), scale)
            return got, reference.add(reference.normalise(rows, weight, EPSILON), added, scale)

        ops += [rms_norm, add_normed]
    for weight, bias_or_none in ((None, None), (wide, None), (wide, bias)):

        def layer_norm(rows: Tensor, weight=weight, bias=bias_or_none) -> tuple[Tensor, Tensor]:
            options = {"bias": there(bias), "is_centred": True}
            normed, total, _ = norms.norm(rows.to(DEVICE), there(weight), EPSILON, added.to(DEVICE), 0.5, **options)
            expected = reference.layer_norm(rows, weight, bias, EPSILON, added, 0.5)
            assert_equal_bits(total, expected[1])
            return normed, expected[0]

        ops.append(layer_norm)
    return ops


@for_dtypes
@pytest.mark.parametrize("width", [1, 15, 48, 1030])
def test_norms_are_the_references(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    guards = Guards(monkeypatch)
    exact, any_rows = balanced_eighths(5, width, dtype=dtype), random(5, width, dtype=dtype, seed=4) + 1
    for op in make_ops(width, dtype):
        assert_equal_bits(*op(exact))
        # Where a sum is near 0 little is left of its last places.
        assert_one_rounding(*op(any_rows), atol=1e-6 if dtype is torch.float32 else 4e-3)
    guards.check()


@for_dtypes
def test_sums_are_the_references(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    guards = Guards(monkeypatch)
    for width, scale in ((1, 1.0), (131, 0.3), (1030, 1.0)):
        rows, residual = random(3, width, dtype=dtype), random(3, width, dtype=dtype, seed=1)
        got = norms.add(rows.to(DEVICE), residual.to(DEVICE), scale)
        assert_equal_bits(got, reference.add(rows, residual, scale))
    guards.check()


@for_dtypes
def test_rows_are_normed_in_their_places(dtype: torch.dtype):
    rows, weight = balanced_eighths(3, 40, dtype=dtype), random(24, dtype=dtype, seed=1)
    expected = rows.clone()
    expected[:, 8:32] = reference.normalise(rows[:, 8:32], weight, EPSILON)
    got = rows.to(DEVICE)
    norms.norm_in_place(got[:, 8:32], weight.to(DEVICE), EPSILON)
    assert_equal_bits(got, expected)


@for_dtypes
def test_rows_have_the_same_bits_in_any_company(dtype: torch.dtype):
    rows, weight = random(9, 131, dtype=dtype).to(DEVICE), random(131, seed=1).to(DEVICE)

    def compute(part: Tensor) -> tuple[Tensor, ...]:
        centred = norms.norm(part, weight, EPSILON, bias=weight, is_centred=True)
        added = norms.add_normed(part, weight, EPSILON, part.flip(1), 0.3)
        return norms.norm(part, weight, EPSILON, part.flip(1))[0], centred[0], added

    whole = compute(rows)
    for first, last in ((0, 1), (3, 5), (2, 9)):
        for got, all_rows in zip(compute(rows[first:last]), whole, strict=True):
            assert torch.equal(got, all_rows[first:last])


def test_nothing_to_do_is_no_error():
    nothing = torch.empty(0, 8, device=DEVICE)
    assert norms.norm(nothing, None, EPSILON, nothing)[0].shape == (0, 8)
    assert norms.add_normed(nothing, None, EPSILON, nothing).shape == norms.add(nothing, nothing).shape == (0, 8)
