"""Activations and rows of tables in Triton: the reference's bits, and not a byte beside what they are to write."""

from __future__ import annotations

import pytest
import torch

from blockyard_kernels.cuda import elementwise
from blockyard_kernels.lora import VirtualRows
from blockyard_kernels.reference import elementwise as reference
from tests.kit.kernels.exact_numbers import assert_equal_bits, assert_one_rounding
from tests.kit.kernels.guards import Guards
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.triton_interpreter import DEVICE, DTYPES

for_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@for_dtypes
@pytest.mark.parametrize("width", [1, 7, 1024, 1100])
def test_activations_are_the_references(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    guards = Guards(monkeypatch)
    gate_up = random(4, 2 * width, dtype=dtype) * 4
    assert_one_rounding(elementwise.silu_and_mul(gate_up.to(DEVICE)), reference.silu_and_mul(gate_up))
    guards.check()


@for_dtypes
def test_activations_at_the_ends_of_their_range(dtype: torch.dtype):
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 9984.0, torch.nan, torch.inf]], dtype=dtype)
    got = elementwise.silu_and_mul(torch.cat([gate, torch.ones_like(gate)], 1).to(DEVICE)).cpu()[0]
    assert got[2:5].tolist() == [0, 100, 9984]
    assert (got[:2].double().abs() < 1e-30).all()
    assert got.isnan().tolist() == [False] * 5 + [True, False]
    assert got[6] == torch.inf


@for_dtypes
def test_rows_have_the_same_bits_in_any_company(dtype: torch.dtype):
    rows = random(9, 131, dtype=dtype).to(DEVICE)
    active = elementwise.silu_and_mul(rows.repeat(1, 2))
    for first, last in ((0, 1), (3, 5), (2, 9)):
        part = rows[first:last]
        assert torch.equal(elementwise.silu_and_mul(part.repeat(1, 2)), active[first:last])


@for_dtypes
def test_embeddings_are_rows_of_the_table_and_zeros_where_it_ends(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    guards, table = Guards(monkeypatch), random(10, 1033, dtype=dtype).to(DEVICE)
    indices = torch.tensor([3, 3, 9, 0], device=DEVICE)
    assert torch.equal(elementwise.embedding(indices, table), table[indices])
    shifted = elementwise.embedding(torch.tensor([23, 19, 29, 30, 0, 20], device=DEVICE), table, 20)
    expected = torch.stack([table[3], table[0] * 0, table[9], table[0] * 0, table[0] * 0, table[0]])
    assert torch.equal(shifted, expected)
    virtual = VirtualRows(1 << 30, random(2, 1033, dtype=dtype, seed=1).to(DEVICE))
    ids = torch.tensor([3, (1 << 30) + 1, 1 << 30, 10], device=DEVICE)
    expected = torch.stack([table[3], virtual.rows[1], virtual.rows[0], table[0] * 0])
    assert torch.equal(elementwise.embedding(ids, table, virtual=virtual), expected)
    scaled = elementwise.embedding(ids, table, scale=3.3, virtual=virtual)
    # In float32, and rounded once; what is virtual is as it is.
    expected[0] = (table[3].float() * 3.3).to(dtype)
    assert_equal_bits(scaled, expected.cpu())
    guards.check()


@for_dtypes
def test_nothing_to_do_is_no_error(dtype: torch.dtype):
    nothing = torch.empty(0, 8, dtype=dtype, device=DEVICE)
    assert elementwise.silu_and_mul(nothing).shape == (0, 4)
    assert elementwise.embedding(torch.empty(0, dtype=torch.int64, device=DEVICE), nothing).shape == (0, 8)
