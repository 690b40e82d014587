"""A short run of `tests.kit.oracles.hostile_grammars`: what nobody means well with is refused, or costs little."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.grammars.compiling.compilers import Compilers
from tests.kit.oracles.hostile_grammars import (
    BOUNDS,
    KINDS,
    Cost,
    make_form,
    make_vocabulary,
    measure_answer,
    measure_apart,
    measure_check,
)

if TYPE_CHECKING:
    import pytest

NUM_CASES = 8 * len(KINDS)
# Processors are slower where others use them, too: the program holds the times themselves.
PATIENCE = 8


def test_it_is_refused_or_costs_little() -> None:
    vocabulary, compilers = make_vocabulary(1000), Compilers()
    refused: list[str] = []
    try:
        for number in range(NUM_CASES):
            cost, grammar = measure_check(make_form(number), compilers)
            answer = measure_answer(grammar, vocabulary, number) if grammar else Cost()
            assert answer.reason in ("", "GRAMMAR_TOO_COMPLEX"), (number, answer)
            for name, seconds in {"check": cost.check, "compile": answer.compile, "mask": answer.mask}.items():
                assert seconds < PATIENCE * BOUNDS[name], (number, name, seconds)
            refused.append(cost.reason)
    finally:
        compilers.close()
    assert {"", "FIELD_INVALID", "GRAMMAR_TOO_COMPLEX"} == set(refused)


def test_one_that_takes_far_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.kit.oracles.hostile_grammars.MAX_SECONDS", 0.01)
    multiples = [{"multipleOf": number} for number in (7, 11, 13, 17, 19, 23)]
    cost = measure_apart(
        f'start: %json {{"type": "integer", "allOf": {multiples}}}'.replace("'", '"'), make_vocabulary(300), 1
    )
    assert cost.reason == "DIED"
    assert cost.over() == ["compile", "mask"]
