"""The ladder of the reference's packed linear layers: each rung right, and what its rows depend on."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from blockyard_kernels.invariance import ROW_COUNTS
from blockyard_kernels.reference import probe
from blockyard_kernels.reference.linear import LADDER, Method, ReferenceLinear, can_prepack
from blockyard_kernels.reference.probe import columns_are_independent, rows_are_independent, settle_linears
from blockyard_kernels.select import get_backend
from tests.kit.kernels.random_tensors import random
from tests.kit.kernels.row_dependent import TiledLinear, in_order

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make(method: Method, dtype: torch.dtype, *, bias: bool = True, out: int = 72, width: int = 48) -> ReferenceLinear:
    weight = random(out, width, dtype=dtype) * width**-0.5
    return ReferenceLinear(weight, random(out, dtype=dtype, seed=1) if bias else None, method)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("num_rows", [1, 2, 3, 33])
def test_it_multiplies(method: Method, dtype: torch.dtype, num_rows: int):
    hidden = random(num_rows, 48, dtype=dtype, seed=2)
    weight, bias = random(72, 48, dtype=dtype) * 48**-0.5, random(72, dtype=dtype, seed=1)
    expected = functional.linear(hidden.double(), weight.double(), bias.double())
    got = ReferenceLinear(weight, bias, method)(hidden)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", LADDER)
@pytest.mark.parametrize(("out", "width"), [(200, 320), (512, 2048)])
def test_what_the_probe_says_of_rows_holds_for_counts_that_it_did_not_try(
    method: Method, dtype: torch.dtype, out: int, width: int
):
    """Each method on each processor is either found wanting, or keeps its rows."""
    linear = make(method, dtype, out=out, width=width)
    rows = random(700, width, dtype=dtype, seed=2)
    expected = linear(rows)
    tolerance = 0.0 if rows_are_independent(linear) else TOLERANCE[dtype]
    for count in (1, 6, 13, 45, 77, 200, 513):
        for start in (0, 5, 700 - count):
            got = linear(rows[start : start + count])
            torch.testing.assert_close(got, expected[start : start + count], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", LADDER)
def test_what_the_probe_says_of_columns_holds_for_shards_that_it_did_not_try(method: Method, dtype: torch.dtype):
    weight, rows = random(256, 320, dtype=dtype) * 320**-0.5, random(40, 320, dtype=dtype, seed=2)
    linear = ReferenceLinear(weight, None, method)
    whole = linear(rows)
    parts = [ReferenceLinear(part, None, method)(rows) for part in weight.split([96, 80, 48, 32])]
    tolerance = 0.0 if columns_are_independent(linear, method) else TOLERANCE[dtype]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_probe_finds_tiles_that_sum_in_another_order(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """In bfloat16 few outputs of a wide product show it, as few as on a processor with AMX."""
    # This is about rows. Whether columns are independent depends on the processor's library: MKL's on Intel are not.
    monkeypatch.setattr(probe, "columns_are_independent", lambda *_: True)
    weight = random(64, 2048, dtype=dtype) * 2048**-0.5
    linears = [TiledLinear(weight, None, Method.PREPACKED) for _ in range(2)]
    assert not rows_are_independent(linears[0])
    assert settle_linears(linears)
    assert {linear.method for linear in linears} == {Method.TILED}


def test_rows_are_compared_before_they_are_rounded(monkeypatch: pytest.MonkeyPatch):
    """Where half floats are multiplied in float32, rounding hides nearly every sum that was made in another order."""

    class Counted(ReferenceLinear):
        def _products(self, hidden: torch.Tensor) -> torch.Tensor:
            return in_order(hidden, self._weights[0]) * (1 + 2**-23 * (len(hidden) % 8 == 4))

    monkeypatch.setattr("blockyard_kernels.reference.linear.can_prepack", lambda dtype: dtype is torch.float32)
    linear = Counted(random(8, 48, dtype=torch.bfloat16), None, Method.TILED)
    linear.method = Method.PADDED
    rows = random(8, 48, dtype=torch.bfloat16, seed=2)
    assert torch.equal(linear(rows[:3]), linear(rows)[:3]), "rounding hides it here"
    assert not rows_are_independent(linear)


def test_a_product_of_more_rows_than_the_probe_tries_is_cut():
    seen: list[int] = []

    class Counting(ReferenceLinear):
        def _products(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(len(hidden))
            return super()._products(hidden)

    linear = Counting(random(72, 48), None, Method.PREPACKED)
    rows = random(1200, 48, seed=2)
    torch.testing.assert_close(linear(rows), functional.linear(rows, random(72, 48)), rtol=1e-5, atol=1e-5)
    assert (seen, linear.max_rows) == ([512, 512, 176], max(ROW_COUNTS))
    assert ReferenceLinear(random(200_000, 2), None, Method.PREPACKED).max_rows == 96, "as many results as fit"


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_anew_changes_no_weight(dtype: torch.dtype):
    linear, rows = make(Method.PREPACKED, dtype), random(8, 48, dtype=dtype, seed=2)
    before = linear(rows)
    for method in (Method.PADDED, Method.TILED, Method.PREPACKED):
        linear.pack(method)
        torch.testing.assert_close(linear(rows), before, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(linear(rows), before)


def test_no_rows_give_no_rows():
    assert make(Method.PREPACKED, torch.float32)(torch.empty(0, 48)).shape == (0, 72)


def test_rows_may_be_strided():
    linear, wide = make(Method.PREPACKED, torch.float32), random(9, 100, seed=3)
    assert torch.equal(linear(wide[:, 20:68]), linear(wide[:, 20:68].contiguous()))
    assert torch.equal(linear(wide[::2, :48]), linear(wide[::2, :48].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_counted_as_they_are_held(dtype: torch.dtype):
    held = dtype.itemsize if can_prepack(dtype) else 4
    assert make(Method.PREPACKED, dtype).num_bytes == (72 * 48 + 72) * held
    assert make(Method.PREPACKED, dtype, bias=False).num_bytes == 72 * 48 * held


class Fickle(TiledLinear):
    """Keeps its rows by one method only."""

    likes: Method | None = Method.TILED

    def _products(self, hidden: torch.Tensor) -> torch.Tensor:
        result = in_order(hidden, self._plain)
        return result if self.method is self.likes else result + len(hidden)


@pytest.mark.parametrize(("likes", "settled"), [(Method.PADDED, True), (Method.TILED, True), (None, False)])
def test_the_probe_steps_down_until_rows_are_independent(
    monkeypatch: pytest.MonkeyPatch, likes: Method | None, settled: bool
):
    monkeypatch.setattr(Fickle, "likes", likes)
    monkeypatch.setattr(probe, "columns_are_independent", lambda *_: True)
    linears = [Fickle(random(16, 8), None, Method.PREPACKED) for _ in range(3)]
    steady = TiledLinear(random(24, 8), None, Method.PADDED)
    steady.tiled = frozenset()
    assert settle_linears([*linears, steady]) is settled
    assert steady.method is Method.PADDED, "only the shape that failed is packed anew"
    assert {linear.method for linear in linears} == {likes or Method.PREPACKED}


@pytest.mark.parametrize("kept", [(), (Method.TILED,)])
def test_the_probe_steps_down_until_columns_are_independent(monkeypatch: pytest.MonkeyPatch, kept: tuple[Method, ...]):
    monkeypatch.setattr(probe, "columns_are_independent", lambda _like, method: method in kept)
    linear = TiledLinear(random(24, 8), None, Method.PREPACKED)
    linear.tiled = frozenset()
    assert settle_linears([linear]) is bool(kept)
    assert linear.method is (Method.TILED if kept else Method.PREPACKED)


def test_without_onednn_everything_is_padded(monkeypatch: pytest.MonkeyPatch):
    from blockyard_kernels.reference.backend import ReferenceBackend

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    backend = ReferenceBackend(CPU)
    packed = backend.pack_linear(random(72, 48, dtype=torch.bfloat16))
    assert isinstance(packed, ReferenceLinear)
    assert packed.method is Method.PADDED
    assert packed.num_bytes == 72 * 48 * 4, "half floats are multiplied in float32"


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="no backend for device 'meta'"):
        get_backend(torch.device("meta"), torch.float32)
    assert get_backend(CPU, torch.float32, "reference") is get_backend(CPU, torch.float32, "reference")
