"""Whatever is sent as a format is refused by its reason, or is a grammar that leads to an answer."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import PARSER_LIMITS
from gateway.grammars.checking import check_format
from gateway.request import JsonSchema, Lark, OutputFormat, Regex
from tests.kit.oracles.schemas import SCHEMAS

if TYPE_CHECKING:
    from gateway.grammars.compiling.compilers import Compilers

NUM_CASES = 2000
REFUSALS = {Reason.FIELD_INVALID, Reason.GRAMMAR_TOO_COMPLEX}
STRANGE: list[Any] = [None, True, False, -1, 0, 1e308, 2**70, "", "a", "\ud800", "#/nowhere", [], {}, [{}], "(" * 50]
KEYWORDS = ["not", "type", "items", "$ref", "pattern", "minLength", "maxItems", "anyOf", "enum", "const", "format"]
BYTES = LLTokenizer("byte")


def change(draw: random.Random, tree: Any) -> Any:
    """Changes one thing somewhere in a tree."""
    if isinstance(tree, dict) and tree and draw.random() < 0.8:
        name = draw.choice(list(tree))
        if draw.random() < 0.15:
            return {**tree, draw.choice(KEYWORDS): draw.choice(STRANGE)}
        if draw.random() < 0.1:
            return {each: value for each, value in tree.items() if each != name}
        return {**tree, name: change(draw, tree[name])}
    if isinstance(tree, list) and tree and draw.random() < 0.8:
        place = draw.randrange(len(tree))
        return [*tree[:place], change(draw, tree[place]), *tree[place + 1 :]]
    return draw.choice([*STRANGE, tree, draw.choice(SCHEMAS)])


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
    matcher, ids = LLMatcher(BYTES, grammar, log_level=0), list(text.encode())
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
