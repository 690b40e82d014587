"""What the reference promises, and what it does not, whatever the processor's libraries do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from blockyard_kernels.reference import attention, elementwise, probe
from blockyard_kernels.reference.backend import ReferenceBackend
from blockyard_kernels.reference.linear import Method
from blockyard_kernels.shapes import AttentionShape, LinearSpec
from tests.kit.kernels.processors import PROCESSORS, Processor
from tests.kit.kernels.row_dependent import TiledLinear

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16, 0.25)


def exact_product(left: Tensor, right: Tensor) -> Tensor:
    """Multiplies what both sides are in bfloat16: sums of so few digits are exact in float64, in any order."""
    return torch.bmm(left.bfloat16().double(), right.bfloat16().double()).float()


def multiply_by_tiles(num_rows: int) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Makes a product that gives the rows past its last whole tile other bits."""

    def multiply(left: Tensor, right: Tensor, result: Tensor) -> None:
        result.copy_(exact_product(left, right))
        result[:, left.shape[1] // num_rows * num_rows :] *= 1 + 2**-20

    return multiply


@pytest.mark.parametrize(("tile", "found"), [(1, 4), (8, 8), (16, 16), (64, 64), (48, None)])
def test_tiles_of_attention_are_padded_until_they_keep_their_rows(
    monkeypatch: pytest.MonkeyPatch, tile: int, found: int | None
):
    """A decode has 2 rows, padded; a prefill's 64 rows leave some over of tiles of 48 whatever the padding."""
    monkeypatch.setattr(attention, "_multiply", multiply_by_tiles(tile))
    assert probe.find_row_multiple(SHAPE) == found
    backend = ReferenceBackend(CPU)
    assert backend.probe([], SHAPE) is (found is not None)


def test_attention_whose_rows_depend_on_the_number_of_pairs_is_not_promised(monkeypatch: pytest.MonkeyPatch):
    def multiply(left: Tensor, right: Tensor, result: Tensor) -> None:
        result.copy_(exact_product(left, right))
        result *= 1 + 2**-20 * (len(left) % 2)

    monkeypatch.setattr(attention, "_multiply", multiply)
    assert probe.find_row_multiple(AttentionShape(4, 1, 16, 0.25)) is None


def test_no_library_is_given_a_single_pair(monkeypatch: pytest.MonkeyPatch):
    """Of one pair it may cut the sums among its threads."""
    seen: set[int] = set()
    plain = torch.bmm

    def bmm(left: Tensor, right: Tensor, **options: Tensor) -> Tensor:
        seen.add(len(left))
        return plain(left, right, **options)

    monkeypatch.setattr(torch, "bmm", bmm)
    probe.find_row_multiple(AttentionShape(4, 1, 16, 0.25))
    assert min(seen) == 2


def test_each_shape_of_heads_keeps_what_was_found_for_it(monkeypatch: pytest.MonkeyPatch):
    backend, used = ReferenceBackend(CPU), dict[AttentionShape, int]()
    shapes = {AttentionShape(4, 2, 16, 0.25): 16, AttentionShape(4, 2, 32, 0.2): 8, AttentionShape(2, 2, 16, 0.2): None}
    monkeypatch.setattr(probe, "find_row_multiple", shapes.get)
    monkeypatch.setattr(attention, "paged_attention", lambda *given: used.update({given[4]: given[6]}))
    for shape, multiple in shapes.items():
        assert backend.probe([], shape) is (multiple is not None)
    for shape in shapes:
        backend.paged_attention(torch.empty(0), None, torch.empty(0), 0, shape)  # type: ignore[arg-type]
    assert list(used.values()) == [16, 8, 4]


@pytest.mark.parametrize("op", ["normalise", "activate_and_mul"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_activations_that_depend_on_the_rows_are_not_promised(
    monkeypatch: pytest.MonkeyPatch, op: str, dtype: torch.dtype
):
    linear = TiledLinear(torch.randn(32, 8).to(dtype), None, Method.TILED, LinearSpec(gated=True))
    assert probe.elementwise_is_independent([linear])
    plain = getattr(elementwise, op)
    monkeypatch.setattr(elementwise, op, lambda rows, *rest, **how: plain(rows, *rest, **how) + (len(rows) % 2))
    assert not probe.elementwise_is_independent([linear])
    assert not ReferenceBackend(CPU).probe([linear], SHAPE)


def test_threads_that_change_the_bits_are_not_promised(monkeypatch: pytest.MonkeyPatch):
    """A worker may go down to one thread after the probe."""
    torch.set_num_threads(2)
    plain = elementwise.activate_and_mul
    monkeypatch.setattr(
        elementwise, "activate_and_mul", lambda rows, activation: plain(rows, activation) + torch.get_num_threads()
    )
    linear = TiledLinear(torch.randn(32, 8), None, Method.TILED, LinearSpec(gated=True))
    assert not probe.elementwise_is_independent([linear])
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("processor", PROCESSORS, ids=str)
def test_what_is_promised_on_another_processor_holds_there(processor: Processor, tmp_path: Path):
    """Each is a process of its own whose libraries take that processor's kernels: hence the seconds it takes."""
    report = processor.sweep(tmp_path)
    assert report.broken == []
    assert report.num_promised > 0
