"""Linear layers of every backend: right over tails of all kinds, and a row's bits are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch.nn import functional

from blockyard_kernels.shapes import Activation, LinearSpec, LogitTransform
from tests.kit.kernels.backends import COMPILED, KERNELS, REFERENCE, Kernels
from tests.kit.kernels.random_tensors import random

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard_kernels.cpu.packed import CpuLinear

for_all = pytest.mark.parametrize("kernels", KERNELS, ids=str)
for_compiled = pytest.mark.parametrize("kernels", COMPILED, ids=str)
# Outputs and inputs: fewer than a vector, whole panels of both widths (16 and 32), and one more and less than those.
SIZES = [(1, 2), (7, 6), (16, 16), (25, 34), (31, 4), (32, 48), (33, 50), (49, 10), (72, 320), (100, 2)]
COUNTS = [1, 2, 3, 4, 5, 11, 12, 13, 25, 200]

EXACT: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.GELU_ERF: functional.gelu,
    Activation.RELU2: lambda x: functional.relu(x).square(),
}


class Layer:
    """A weight and a bias, dense and packed, and what they must give."""

    def __init__(
        self, kernels: Kernels, num_rows: int, width: int, *, bias: bool = True, gated: bool = False, seed: int = 0
    ) -> None:
        self.kernels, self.is_gated = kernels, gated
        self.weight = (random(num_rows, width, seed=seed) * width**-0.5).to(kernels.dtype)
        self.bias = random(num_rows, dtype=kernels.dtype, seed=seed + 1) if bias else None
        self.packed = kernels.backend.pack_linear(self.weight.clone(), self.bias, LinearSpec(gated=gated))

    def __call__(self, rows: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
        return self.kernels.backend.linear(rows, self.packed, wide=wide)

    def rows(self, count: int, seed: int = 2) -> torch.Tensor:
        return random(count, self.weight.shape[1], dtype=self.kernels.dtype, seed=seed)

    def exact(self, rows: torch.Tensor) -> torch.Tensor:
        """In float64."""
        bias = None if self.bias is None else self.bias.double()
        result = functional.linear(rows.double(), self.weight.double(), bias)
        if not self.is_gated:
            return result
        gate, up = result.chunk(2, dim=1)
        return functional.silu(gate) * up

    def assert_right(self, rows: torch.Tensor, *, wide: bool = False) -> None:
        """The error is that of one rounding and of the sums in float32; half floats may round the gate's parts too."""
        got, expected = self(rows, wide=wide), self.exact(rows)
        assert got.dtype == (torch.float32 if wide else self.kernels.dtype)
        is_half = self.kernels.dtype != torch.float32 and (not wide or self.kernels.is_reference)
        tolerance = 3 * torch.finfo(self.kernels.dtype).eps if is_half else 3e-6
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@for_all
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_it_multiplies(kernels: Kernels, num_rows: int, width: int, bias: bool):
    layer = Layer(kernels, num_rows, width, bias=bias)
    for count in COUNTS:
        layer.assert_right(layer.rows(count))


@for_all
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("num_outputs", "width"), SIZES)
def test_a_gated_weight_gives_the_activated_rows(kernels: Kernels, num_outputs: int, width: int, bias: bool):
    layer = Layer(kernels, 2 * num_outputs, width, bias=bias, gated=True)
    assert layer.packed.out_features == num_outputs
    for count in (1, 5, 13):
        layer.assert_right(layer.rows(count))


@for_all
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_weight_is_given_back_as_it_came(kernels: Kernels, gated: bool):
    for num_rows, width in ((2, 2), (34, 50), (100, 34), (64, 64)):
        layer = Layer(kernels, num_rows, width, gated=gated)
        weight, bias = layer.packed.unpack()
        assert torch.equal(weight, layer.weight)
        assert layer.bias is not None
        assert bias is not None
        assert torch.equal(bias, layer.bias)
        weight.fill_(7), bias.fill_(7)
        layer.assert_right(layer.rows(3))
        assert str(kernels.dtype).removeprefix("torch.") in layer.packed.layout or kernels.is_reference


@for_all
def test_the_leaves_of_a_weight_are_given_back_side_by_side(kernels: Kernels):
    weight = random(34, 64, dtype=kernels.dtype)
    unpacked, bias = kernels.backend.pack_linear(weight.clone(), spec=LinearSpec(leaves=4)).unpack()
    assert torch.equal(unpacked, weight)
    assert bias is None


@for_all
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_wide_results_are_float32(kernels: Kernels, num_rows: int, width: int):
    layer = Layer(kernels, num_rows, width)
    for count in (1, 5, 13):
        layer.assert_right(layer.rows(count), wide=True)


@for_all
@pytest.mark.parametrize(("num_rows", "width"), [(7, 6), (33, 50), (100, 2)])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_wide_results_are_scaled_and_capped(kernels: Kernels, bias: bool, num_rows: int, width: int):
    layer = Layer(kernels, num_rows, width, bias=bias)
    rows = layer.rows(13)
    sums = layer(rows, wide=True).double()
    for transform in (LogitTransform(0.25), LogitTransform(1.0, 0.7), LogitTransform(-3.0, 1.5)):
        packed = kernels.backend.pack_linear(layer.weight, layer.bias, LinearSpec(logits=transform))
        expected, cap = sums * transform.scale, transform.softcap
        expected = torch.tanh(expected / cap) * cap if cap else expected
        got = kernels.backend.linear(rows, packed, wide=True)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=0)
        assert torch.equal(kernels.backend.linear(rows, packed), layer(rows)), "what is no logit stays as it is"


@for_all
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_an_activation_comes_after_the_bias(kernels: Kernels, gated: bool):
    """Over panels with tails; and a row has the same bits in any number of rows."""
    for activation, num_outputs in ((Activation.GELU_TANH, 7), (Activation.GELU_ERF, 33), (Activation.RELU2, 49)):
        layer = Layer(kernels, (1 + gated) * num_outputs, 50, gated=gated)
        packed = kernels.backend.pack_linear(layer.weight, layer.bias, LinearSpec(gated=gated, activation=activation))
        rows = layer.rows(25)
        assert layer.bias is not None
        result = functional.linear(rows.double(), layer.weight.double(), layer.bias.double())
        gate, up = result.chunk(2, dim=1) if gated else (result, torch.ones_like(result))
        exact = EXACT[activation](gate) * up
        got = kernels.backend.linear(rows, packed)
        tolerance = 5e-6 if kernels.dtype == torch.float32 else 6 * torch.finfo(kernels.dtype).eps
        torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
        for first, last in ((0, 1), (3, 5), (7, 20)):
            assert torch.equal(kernels.backend.linear(rows[first:last], packed), got[first:last])


@pytest.mark.parametrize("kernels", [each for each in COMPILED if each.dtype == torch.bfloat16], ids=str)
def test_bfloat16_errs_no_more_than_the_reference_does(kernels: Kernels):
    """And its wide results far less: they are never rounded."""
    layer, reference = Layer(kernels, 200, 600), Layer(Kernels(REFERENCE, torch.bfloat16), 200, 600)
    rows = layer.rows(40)
    exact = layer.exact(rows)
    theirs = (reference(rows).double() - exact).abs().mean()
    assert (layer(rows).double() - exact).abs().mean() <= 1.01 * theirs
    assert (layer(rows, wide=True).double() - exact).abs().mean() <= 0.001 * theirs


@for_all
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_row_is_the_same_bits_in_any_number_of_rows(kernels: Kernels, gated: bool):
    layer = Layer(kernels, 90, 330, gated=gated)
    rows = layer.rows(413)
    whole = layer(rows)
    for first, last in ((0, 1), (7, 8), (3, 5), (100, 112), (50, 63), (1, 194), (200, 413), (412, 413)):
        assert torch.equal(layer(rows[first:last]), whole[first:last]), (first, last)
    assert torch.equal(layer(rows.flip(0)), whole.flip(0))


@for_compiled
@pytest.mark.parametrize("count", [1, 13, 413])
def test_threads_do_not_matter(kernels: Kernels, count: int):
    layer = Layer(kernels, 490, 66)
    rows = layer.rows(count)
    expected = layer(rows)
    for num_threads in (2, 3, 7, 1):
        kernels.backend.set_num_threads(num_threads)
        assert torch.equal(layer(rows), expected)


@for_all
def test_columns_side_by_side_are_the_columns_apart(kernels: Kernels):
    """A panel that two projections share is none of their business."""
    first, second = Layer(kernels, 23, 48, bias=False), Layer(kernels, 40, 48, bias=False, seed=5)
    rows = first.rows(5)
    fused = kernels.backend.pack_linear(torch.cat([first.weight, second.weight]))
    assert torch.equal(kernels.backend.linear(rows, fused), torch.cat([first(rows), second(rows)], dim=1))


@for_all
def test_rows_may_be_strided(kernels: Kernels):
    layer, wide = Layer(kernels, 72, 48), random(9, 101, dtype=kernels.dtype, seed=3)
    for rows in (wide[:, 20:68], wide[:, 21:69], wide[::2, :48], wide[3:4, 1:49], wide[:, ::2][:, :48]):
        assert torch.equal(layer(rows), layer(rows.contiguous()))


@for_all
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_no_rows_give_no_rows(kernels: Kernels, gated: bool):
    assert Layer(kernels, 72, 48, gated=gated)(torch.empty(0, 48, dtype=kernels.dtype)).shape == (
        0,
        36 if gated else 72,
    )


@for_all
def test_what_is_not_finite_stays_in_its_row_and_its_column(kernels: Kernels):
    layer = Layer(kernels, 40, 48, bias=False)
    rows = layer.rows(7)
    expected = layer(rows)
    rows[3, 5], rows[5, 0] = float("nan"), float("inf")
    got = layer(rows)
    assert torch.equal(got[[0, 1, 2, 4, 6]], expected[[0, 1, 2, 4, 6]])
    assert got[3].isnan().all()
    assert not got[5].isfinite().any()
    layer.weight[39, 0] = float("nan")
    packed = kernels.backend.pack_linear(layer.weight)
    assert kernels.backend.linear(layer.rows(7), packed).isnan().nonzero()[:, 1].unique().tolist() == [39]


def panels_of(layer: Layer) -> torch.Tensor:
    """A packed weight as it lies: [panels, words, columns, values of a word]."""
    packed = cast("CpuLinear", layer.packed)
    columns = 16 if layer.kernels.name == "avx2" else 32
    dtype, width = layer.kernels.dtype, layer.weight.shape[1]
    values_of_word = 4 // dtype.itemsize
    return packed.weight.view(dtype).view(-1, width // values_of_word, columns, values_of_word)


@for_compiled
@pytest.mark.parametrize(("num_rows", "width"), SIZES)
def test_weights_are_packed_in_panels_of_words_and_zeros_past_the_last(kernels: Kernels, num_rows: int, width: int):
    layer = Layer(kernels, num_rows, width)
    panels = panels_of(layer)
    rows = panels.transpose(1, 2).reshape(-1, width)
    assert torch.equal(rows[:num_rows], layer.weight)
    assert not rows[num_rows:].any()
    assert len(rows) - num_rows < panels.shape[2]


@for_compiled
@pytest.mark.parametrize("num_outputs", [1, 8, 33, 100])
def test_gates_and_ups_lie_side_by_side_in_runs_of_a_vector(kernels: Kernels, num_outputs: int):
    layer = Layer(kernels, 2 * num_outputs, 6, gated=True)
    panels = panels_of(layer)
    lanes = panels.shape[2] // 2
    gates, ups = (half.transpose(1, 2).reshape(-1, 6) for half in (panels[:, :, :lanes], panels[:, :, lanes:]))
    assert torch.equal(torch.cat([gates[:num_outputs], ups[:num_outputs]]), layer.weight)
    assert not gates[num_outputs:].any()
    assert not ups[num_outputs:].any()


@for_compiled
def test_a_packed_table_gives_the_rows_that_it_was_made_of(kernels: Kernels):
    layer = Layer(kernels, 77, 34, bias=False)
    assert layer.packed.is_table
    indices = torch.tensor([76, 0, 31, 32, 76, 15, 16])
    assert torch.equal(kernels.backend.embedding(indices, layer.packed), layer.weight[indices])
    assert not Layer(kernels, 8, 34, gated=True).packed.is_table


@for_compiled
def test_bytes_are_counted_as_they_are_held(kernels: Kernels):
    columns = panels_of(Layer(kernels, 1, 2)).shape[2]
    for num_rows in (1, columns, columns + 1):
        rows_held = -(-num_rows // columns) * columns
        assert Layer(kernels, num_rows, 48).packed.num_bytes == (rows_held * 48 + num_rows) * kernels.dtype.itemsize


@pytest.mark.parametrize("kernels", [each for each in COMPILED if each.dtype == torch.bfloat16], ids=str)
def test_an_odd_number_of_half_words_is_refused(kernels: Kernels):
    with pytest.raises(ValueError, match=r"in_features must be even in torch\.bfloat16, not 33"):
        kernels.backend.pack_linear(torch.zeros(4, 33, dtype=torch.bfloat16))


@pytest.mark.parametrize("kernels", [each for each in COMPILED if each.dtype == torch.float32], ids=str)
def test_an_odd_number_of_words_is_none_too_many(kernels: Kernels):
    layer = Layer(kernels, 35, 33)
    layer.assert_right(layer.rows(5))
