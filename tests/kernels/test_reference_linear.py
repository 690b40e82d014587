"""The ladder of the reference's packed linear layers: each rung right, and what its rows depend on."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.ops import AttentionShape, get_backend
from kernels.reference.linear import LADDER, Method, ReferenceLinear, can_prepack
from kernels.reference.probe import rows_are_independent

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
def test_rows_are_independent(method: Method, dtype: torch.dtype):
    assert rows_are_independent(make(method, dtype, out=200, width=320))


def test_a_wide_bfloat16_product_shows_why_one_row_is_padded():
    """Packed bfloat16 with more than 1024 columns takes another kernel for one row: two rows never do."""
    linear = make(Method.PREPACKED, torch.bfloat16, bias=False, out=512, width=2048)
    assert rows_are_independent(linear)


def test_plain_products_do_depend_on_the_rows():
    assert not rows_are_independent(make(Method.PLAIN, torch.float32, out=200, width=320))


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


def test_columns_side_by_side_are_the_columns_apart():
    first, second = random(24, 48), random(40, 48, seed=1)
    rows = random(5, 48, seed=2)
    apart = [ReferenceLinear(weight, None, Method.PREPACKED)(rows) for weight in (first, second)]
    fused = ReferenceLinear(torch.cat([first, second]), None, Method.PREPACKED)(rows)
    assert torch.equal(fused, torch.cat(apart, dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_counted_as_they_are_held(dtype: torch.dtype):
    held = dtype.itemsize if can_prepack(dtype) else 4
    assert make(Method.PREPACKED, dtype).num_bytes == (72 * 48 + 72) * held
    assert make(Method.PREPACKED, dtype, bias=False).num_bytes == 72 * 48 * held


class Fickle(ReferenceLinear):
    """Gives rows that depend on their number, until it is packed for a method that it likes."""

    likes: Method | None = Method.TILED

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        result = super().__call__(hidden)
        return result if self.method is self.likes else result + len(hidden)


@pytest.mark.parametrize(("likes", "settled"), [(Method.PADDED, True), (Method.TILED, True), (None, False)])
def test_the_probe_steps_down_until_rows_are_independent(
    monkeypatch: pytest.MonkeyPatch, likes: Method | None, settled: bool
):
    monkeypatch.setattr(Fickle, "likes", likes)
    linears = [Fickle(random(16, 8), None, Method.PREPACKED) for _ in range(3)]
    steady = make(Method.PREPACKED, torch.float32)
    assert (
        get_backend(CPU, torch.float32, "reference").probe([*linears, steady], AttentionShape(4, 2, 16, 0.25))
        is settled
    )
    assert steady.method is Method.PREPACKED, "only the shape that failed is packed anew"
    assert {linear.method for linear in linears} == {likes or Method.PREPACKED}


def test_without_onednn_everything_is_padded(monkeypatch: pytest.MonkeyPatch):
    from kernels.reference.backend import ReferenceBackend

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    backend = ReferenceBackend(CPU)
    packed = backend.pack_linear(random(72, 48, dtype=torch.bfloat16))
    assert isinstance(packed, ReferenceLinear)
    assert packed.method is Method.PADDED
    assert packed.num_bytes == 72 * 48 * 4, "half floats are multiplied in float32"
    assert rows_are_independent(packed)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="no backend for device 'meta'"):
        get_backend(torch.device("meta"), torch.float32)
    assert get_backend(CPU, torch.float32, "reference") is get_backend(CPU, torch.float32, "reference")
