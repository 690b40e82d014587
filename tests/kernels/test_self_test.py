"""The kernels are held to their arithmetic, spelled out one number at a time, when they are loaded."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from blockyard_kernels.cpu import self_test
from blockyard_kernels.cpu.backend import CpuBackend, choose_backend
from blockyard_kernels.cpu.library import Library
from blockyard_kernels.cpu.processors import chosen_instruction_sets
from blockyard_kernels.cpu.self_test import SHAPES, Arithmetic, Trial, candidates
from blockyard_kernels.packed import QuantizedWeight
from blockyard_kernels.shapes import AttentionShape, LinearSpec
from tests.kit.kernels.backends import BEST, COMPILED, INSTRUCTION_SETS, Kernels, build_kernels
from tests.kit.kernels.random_tensors import random

choose = choose_backend.__wrapped__
BFLOAT16 = [each for each in COMPILED if each.dtype == torch.bfloat16]
ORDERS = [Arithmetic.FUSED, Arithmetic.PAIRS_ODD_FIRST, Arithmetic.PAIRS_EVEN_FIRST, Arithmetic.TILES]


@pytest.fixture(autouse=True)
def built() -> None:
    build_kernels()


def backend_of(kernels: Kernels) -> CpuBackend:
    return cast("CpuBackend", kernels.backend)


@pytest.mark.parametrize("kernels", COMPILED, ids=str)
def test_every_set_has_an_arithmetic_here_and_it_is_part_of_its_identity(kernels: Kernels):
    backend = backend_of(kernels)
    assert backend.arithmetic in candidates(kernels.name, kernels.dtype, "none")
    assert backend.arithmetic is not None
    assert backend.identity.endswith("/" + backend.arithmetic.name)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_so_it_is_in_int8(instruction_set: str, dtype: torch.dtype):
    assert CpuBackend(dtype, instruction_set, "int8").arithmetic is Arithmetic.WHOLE_NUMBERS


@pytest.mark.parametrize("kernels", COMPILED, ids=str)
def test_products_of_four_bits_are_held_to_their_definition(kernels: Kernels):
    """Also that they are told from the next number."""
    product = backend_of(kernels)._grouped_product
    assert self_test.knows_groups(product, kernels.dtype)
    above = torch.tensor(float("inf"))
    assert not self_test.knows_groups(lambda *given: product(*given).nextafter(above), kernels.dtype)


def test_no_promise_is_made_where_they_are_others(monkeypatch: pytest.MonkeyPatch):
    backend = CpuBackend(torch.float32, BEST)
    levels = torch.ones(32, 32, dtype=torch.uint8)
    weight = QuantizedWeight(torch.float32, levels, torch.ones(32, 1), torch.ones(32, 1, dtype=torch.uint8))
    packed = backend.pack_linear(weight)
    tried = list[object]()
    monkeypatch.setattr(backend, "_keeps_rows", lambda linear: tried.append(linear))
    assert backend.probe([packed], AttentionShape(2, 1, 8, 0.4))
    assert not tried
    monkeypatch.setattr(backend, "_grouped_product", lambda rows, weight, leaves: torch.zeros(len(rows), 1))
    assert not backend.probe([packed], AttentionShape(2, 1, 8, 0.4))
    assert tried == [packed]


@pytest.mark.parametrize("kernels", BFLOAT16, ids=str)
def test_the_trials_tell_arithmetics_apart(kernels: Kernels):
    """So a processor cannot pass by another one's."""
    trials = [Trial.random(shape, torch.bfloat16) for shape in SHAPES]
    library = Library(kernels.name)
    bits = {
        order: torch.cat([trial.spell_out(library, order).flatten() for trial in trials]).numpy().tobytes()
        for order in ORDERS
    }
    assert len(set(bits.values())) == len(ORDERS)


def test_denormals_alone_tell_those_apart_that_drop_them():
    library = Library(BEST)
    rows, weight = torch.full((1, 32), 2.0**-130, dtype=torch.bfloat16), torch.ones(1, 32, dtype=torch.bfloat16)
    trial = Trial(rows, weight, 1)
    assert trial.spell_out(library, Arithmetic.FUSED).item() == 2.0**-125
    assert all(trial.spell_out(library, order).item() == 0 for order in ORDERS[1:])


@pytest.mark.parametrize("kernels", BFLOAT16, ids=str)
def test_bfloat16_errs_hardly_more_than_the_instruction_for_it_would(kernels: Kernels):
    """Against float64, on any processor: the yardstick is VDPBF16PS as the manual has it."""
    library, rows, weight = Library(kernels.name), random(8, 1536), random(64, 1536, seed=1)
    trial = Trial(rows.bfloat16(), weight.bfloat16(), 1)
    exact = trial.rows.double() @ trial.weight.double().T
    yardstick = (trial.spell_out(library, Arithmetic.PAIRS_ODD_FIRST) - exact).abs().mean()
    for leaves in (1, 4):
        packed = kernels.backend.pack_linear(trial.weight, spec=LinearSpec(leaves=leaves))
        error = (kernels.backend.linear(trial.rows, packed, wide=True) - exact).abs().mean()
        assert error <= 1.05 * yardstick


@pytest.fixture
def strange_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the first choice's bfloat16 what it is not."""
    wrong = Arithmetic.TILES if BEST == "avx512_bf16" else Arithmetic.PAIRS_EVEN_FIRST
    plain = self_test.candidates

    def candidates(instruction_set: str, dtype: torch.dtype, quantization: str) -> object:
        return (wrong,) if instruction_set == BEST else plain(instruction_set, dtype, quantization)

    monkeypatch.setattr(self_test, "candidates", candidates)


@pytest.mark.usefixtures("strange_processor")
def test_what_fails_is_not_taken_unasked(caplog: pytest.LogCaptureFixture):
    backend = choose(torch.bfloat16, "auto", "none")
    # None, where this processor has one instruction set alone: torch computes.
    following = [f"cpu/{name}" for name in chosen_instruction_sets()[1:2]]
    assert ([backend.name] if backend else []) == following
    assert f"no {BEST} kernels: they fail their self-test on this processor" in caplog.text


@pytest.mark.usefixtures("strange_processor")
def test_what_fails_serves_when_asked_for_and_its_rows_are_tried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    backend = choose(torch.bfloat16, BEST, "none")
    assert backend is not None
    assert backend.arithmetic is None
    assert backend.identity.endswith("/unknown")
    assert f"the {BEST} kernels compute otherwise here" in caplog.text
    packed = backend.pack_linear(random(40, 96, dtype=torch.bfloat16))
    shape = AttentionShape(4, 2, 32, 0.2)
    assert backend.probe([packed], shape)
    monkeypatch.setattr(backend, "linear", lambda rows, _packed: rows * (1 + len(rows)))
    assert not backend.probe([packed], shape)
