"""What compiled grammars take is bounded by how many patterns they have, each and together."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from llguidance import LLTokenizer

from blockyard.grammars.limits import MAX_LEXER_BYTES, PARSER_LIMITS, full_size, parser_limits
from gateway.grammars.problems import schema_text
from tests.kit.oracles.schemas import SCHEMAS
from worker_service.grammars import matchers
from worker_service.grammars.matchers import Grammars

if TYPE_CHECKING:
    import pytest

BYTES = LLTokenizer("byte")


def patterns(count: int) -> str:
    return "\n".join(["start: T0", *(f"T{place}: /(?s:.*{place})/" for place in range(count))])


def num_states(grammar: str) -> int:
    return parser_limits(grammar)["max_lexer_states"]


def test_many_patterns_have_fewer_states() -> None:
    most = PARSER_LIMITS["max_lexer_states"]
    assert num_states(patterns(8)) == most
    assert most / 15 < num_states(patterns(900)) < most / 10
    assert num_states(json.dumps({"grammars": [{"lark_grammar": patterns(900)}]})) == num_states(patterns(900))
    for text in (patterns(900), patterns(1), "", "start: /"):
        assert full_size(text) <= MAX_LEXER_BYTES + 300 * len(text)


def test_what_is_no_pattern_counts_for_none() -> None:
    few = num_states("start: A")
    assert num_states('start: A // "\n# /a/\nB: "/a/" "\\"/b/"' * 99) == few
    for schema in SCHEMAS:
        assert num_states(schema_text(schema)) == few
    assert num_states('// "\nA: /a/\n' * 200) < few


def test_what_is_kept_compiled_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = [schema_text({"const": number}) for number in range(64)]
    grammars = Grammars(BYTES, BYTES.vocab_size)
    first = [grammars.prepare(text) for text in usual]
    assert [grammars.prepare(text) for text in usual] == first
    monkeypatch.setattr(matchers, "_MAX_COMPILED_BYTES", 3 * full_size(usual[-1]))
    kept = [grammars.prepare(text) for text in usual]
    assert [grammars.prepare(text) for text in usual[-3:]] == kept[-3:]
    assert grammars.prepare(usual[0]) is not kept[0]
    assert not grammars.prepare(patterns(900)).result().is_error()
