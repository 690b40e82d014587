"""Whatever is sent as a format is refused by its reason, or is a grammar that leads to an answer."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from blockyard.contract.request import Choices, JsonSchema, Lark, OutputFormat, Regex
from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import MAX_CHOICES, PARSER_LIMITS
from gateway.grammars.checking import check_format
from tests.kit.oracles.hostile_grammars import change
from tests.kit.oracles.schemas import SCHEMAS

if TYPE_CHECKING:
    from gateway.grammars.compiling.compilers import Compilers

NUM_CASES = 2000
REFUSALS = {Reason.FIELD_INVALID, Reason.GRAMMAR_TOO_COMPLEX}
BYTES = LLTokenizer("byte")


def make_format(number: int) -> OutputFormat:
    draw = random.Random(number)
    if number % 3:
        tree = draw.choice(SCHEMAS)
        for _ in range(draw.randint(1, 3)):
            tree = change(draw, tree)
        return JsonSchema(json.dumps(tree), compact=bool(number % 2))
    text = bytes(
        draw.choices(range(256) if number % 2 else b'()[]{}|*+?\\/"^$:ab19\n %', k=draw.randint(1, 60))
    ).decode("utf-8", "replace")
    return draw.choice([Regex, Lark, JsonSchema, lambda text: Lark(f"start: {text}")])(text)


def can_go_on(grammar: str) -> bool:
    """Whether a worker could compile it, and a first byte, or an end, is possible; or a limit says no."""
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    return matcher.is_error() or any(matcher.compute_bitmask()) or matcher.is_error()


CLASSES = [
    "[^\\\\]",
    '[^"\\\\]',
    '[^"]',
    "[^a]",
    "[^\\n]",
    '[^\\n"]',
    '(a|[^"])',
    "[\\x00-!]",
    "[!-~]",
    "[\\s\\S]",
    "[^ -~]",
]
STRINGS = ['"\\\\"', '"\\""', '"\\n"', '"\\t"', '"a"', '"\\u0001"', '" "', '"\u00e9"', '"\\u005c"', '"\\u0022"']


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    ids = list(text.encode())
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_class_allows_no_escape_of_what_it_excludes(pattern: str, compilers: Compilers) -> None:
    anchored = f"^{pattern}$"
    grammar = check_format(JsonSchema(json.dumps({"type": "string", "pattern": anchored})), compilers.begin().complain)
    named = {"patternProperties": {anchored: {}}, "additionalProperties": False, "type": "object", "minProperties": 1}
    as_name = check_format(JsonSchema(json.dumps(named)), compilers.begin().complain)
    for text in STRINGS:
        if accepts(grammar, text) or accepts(as_name, f"{{{text}:1}}"):
            assert re.search(anchored, json.loads(text)), text
    assert any(accepts(grammar, text) for text in STRINGS)


def test_choices_are_these_texts_and_no_others(compilers: Compilers) -> None:
    texts = ["\x00", "a b", "<a>", "~&#-", "\n", "\t\v", "/", "\\", "\\/", "é😀", "[^(]*", "\u2028", "yes", "yes, yes"]
    grammar = check_format(Choices(tuple(texts)), compilers.begin().complain)
    assert all(accepts(grammar, text) for text in texts)
    assert not any(accepts(grammar, text) for text in ("", "yes,", "a", "x", "[^(]", "no"))
    many = Choices(tuple(f"choice {number}" for number in range(MAX_CHOICES)))
    assert accepts(check_format(many, compilers.begin().complain), f"choice {MAX_CHOICES - 1}")


@pytest.mark.parametrize("part", range(4))
def test_it_is_refused_or_leads_somewhere(part: int, compilers: Compilers) -> None:
    for number in range(part, NUM_CASES, 4):
        output = make_format(number)
        try:
            grammar = check_format(output, compilers.begin().complain)
        except BlockyardError as error:
            assert error.http_status == 400, (number, output)
            assert {violation.reason for violation in error.violations} <= REFUSALS
            assert all(violation.field.startswith("format.") for violation in error.violations)
        else:
            assert can_go_on(grammar), (number, output)
