"""The types of arguments, of schemas that nobody has checked: those of tools that are not strict."""

from __future__ import annotations

import time
from typing import Any

import pytest

from blockyard.grammars.limits import MAX_SCHEMA_BYTES
from gateway.dialects.answer_parser import AnswerParser, ParsingRule, ToolSchema
from gateway.dialects.schemas import read_schema, types_of

MAX_SECONDS = 1.0


def types_in(part: Any, **definitions: Any) -> frozenset[str]:
    return types_of({"properties": {"x": part}, "$defs": definitions}, "x")


def test_references_that_lead_to_one_another_are_followed_once() -> None:
    begin = time.process_time()
    text = {"type": "string"}
    endless = {"anyOf": [*[{"$ref": "#/$defs/a"}] * 100, text]}
    assert types_in({"$ref": "#/$defs/a"}, a=endless) == frozenset()
    wide = {name: {"anyOf": [{"$ref": f"#/$defs/{inner}"}] * 100} for name, inner in zip("abc", "bcd", strict=True)}
    assert types_in({"$ref": "#/$defs/a"}, **wide, d=text) == {"string"}
    assert time.process_time() - begin < MAX_SECONDS


@pytest.mark.parametrize("branches", [5, True, {"a": 1}, "a", None, [1], []])
@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_branches_that_are_none_say_nothing(keyword: str, branches: Any) -> None:
    assert types_in({keyword: branches}) == frozenset()


def test_branches_say_what_all_of_them_say() -> None:
    number, either = {"type": ["integer", "null"]}, {"oneOf": [{"const": "a"}, {"enum": [1.5, True]}]}
    assert types_in({"anyOf": [number, either, {"$ref": "#/$defs/a"}]}, a={"type": "array"}) == {
        *("integer", "null", "string", "number", "boolean", "array")
    }
    assert types_in({"anyOf": [number, {}]}) == frozenset()


def test_a_schema_is_read_for_a_call_that_needs_it() -> None:
    parameters = '{"properties": {"x": {"type": "string"}}, "title": "read once"}'
    num_read = read_schema.cache_info().misses

    def call(dialect: str, answer: str) -> str:
        rule = ParsingRule(dialect, (ToolSchema("f", parameters), ToolSchema("g", '{"title": "never read"}')))
        [piece] = AnswerParser(rule, "r", 0, reasoning_is_open=False).push(answer, is_last=True)
        return piece.calls[0].arguments

    assert call("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>') == '{"x": 1}'
    assert read_schema.cache_info().misses == num_read
    assert call("qwen3_coder", "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>") == '{"x": "1"}'
    assert read_schema.cache_info().misses == num_read + 1


def test_a_huge_schema_says_nothing() -> None:
    size = len(text := '{"title": ""}')
    assert read_schema(text.replace('""', f'"{"a" * (MAX_SCHEMA_BYTES - size)}"'))
    assert read_schema(text.replace('""', f'"{"a" * (MAX_SCHEMA_BYTES - size + 1)}"')) == {}
