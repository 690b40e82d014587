"""What llguidance panics at costs the request that brings it, and no process: a wrong keyword is refused before."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest
from llguidance import LLTokenizer

from blockyard.contract.request import JsonSchema, Lark
from blockyard.errors import BlockyardError, Reason
from gateway.dialects.answer_parser import ToolSchema
from gateway.grammars.checking import GrammarChecks, check_format
from gateway.grammars.compiling import compiler_process
from gateway.grammars.compiling import compilers as module
from gateway.grammars.compiling.compiler_process import complain
from gateway.grammars.compiling.compilers import Compilers
from gateway.grammars.problems import schema_text
from gateway.grammars.tools import followed
from gateway.request import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

FIELD = "format.json_schema.schema"
# llguidance quotes the first 100 bytes of a value: these end within a character.
LONG = "🙂" * 50
KEYWORDS = [
    *("$ref", "type", "enum", "anyOf", "oneOf", "allOf", "items", "additionalItems", "prefixItems"),
    *("minItems", "maxItems", "properties", "additionalProperties", "patternProperties", "required", "minProperties"),
    *("maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "multipleOf", "$defs", "definitions"),
]
VALUES: list[Any] = [LONG, [LONG], [[LONG]], [{LONG: LONG}], {LONG: LONG}, {LONG: [LONG]}, None, True, 1.5, -1, 2**70]
BYTES = LLTokenizer("byte")


class Started:
    """Counts the processes that are started."""

    def __init__(self) -> None:
        self.number = 0
        self._popen = module.subprocess.Popen

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.number += 1
        return self._popen(*arguments, **options)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    counter = Started()
    monkeypatch.setattr(module.subprocess, "Popen", counter)
    return counter


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers]:
    """Compilers with one process."""
    monkeypatch.setattr(module, "NUM_COMPILERS", 1)
    made = Compilers()
    yield made
    made.close()


def refused_before(text: str) -> str:
    raise AssertionError(f"it reaches the compiler: {text}")


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({"type": "object", "required": LONG}, ".required"),
        ({"type": "object", "patternProperties": LONG}, ".patternProperties"),
        ({"type": "object", "required": [[LONG]]}, ".required[0]"),
        ({"properties": {"a": {"items": {"type": "string", "minLength": LONG}}}}, ".properties.a.items.minLength"),
        ({"anyOf": [{}, {"$defs": {"b": {"multipleOf": [LONG]}}}]}, ".anyOf[1].$defs.b.multipleOf"),
        ({"type": "string", "pattern": {LONG: LONG}}, ".pattern"),
        ({"properties": {"a": LONG}}, ".properties.a"),
        ({"oneOf": [LONG]}, ".oneOf[0]"),
        ({"type": ["string", [LONG]]}, ".type[1]"),
        ({"items": [{}, LONG]}, ".items[1]"),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_before_it_is_compiled(tree: Any, path: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        check_format(JsonSchema(json.dumps(tree)), refused_before)
    assert raised.value.http_status == 400
    [violation] = raised.value.violations
    assert (violation.reason, violation.field) == (Reason.FIELD_INVALID, f"{FIELD}{path}")
    assert violation.description.startswith("must be ")


def test_all_wrong_values_are_told_at_once() -> None:
    with pytest.raises(BlockyardError) as raised:
        check_format(JsonSchema('{"type": 3, "required": "a", "items": {"minimum": "b"}}'), refused_before)
    fields = [violation.field for violation in raised.value.violations]
    assert fields == [f"{FIELD}{path}" for path in (".type", ".required", ".items.minimum")]


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_what_is_not_refused_makes_llguidance_panic_nowhere(keyword: str) -> None:
    num_compiled = 0
    for value in VALUES:
        tree = {keyword: value}
        try:
            check_format(JsonSchema(json.dumps(tree)), lambda text: "")
        except BlockyardError:
            continue
        num_compiled += 1
        complain(BYTES, schema_text(tree))
    assert num_compiled < len(VALUES)


@pytest.mark.parametrize(
    "tree",
    [
        {"type": ["string", "null"], "minLength": 0, "maxLength": 3, "pattern": "a", "default": 3, "title": "b"},
        {"type": "integer", "minimum": -1.5, "exclusiveMinimum": True, "exclusiveMaximum": 7, "multipleOf": 2},
        {"type": "object", "properties": {"type": {"const": LONG}, "required": True}, "required": ["required"]},
        {"type": "array", "prefixItems": [True, {}], "items": False, "maxItems": 4},
        {"type": "array", "items": [{"type": "null"}], "additionalItems": {"enum": [LONG, [LONG], None]}},
        {"$defs": {"items": {"type": "null"}}, "$ref": "#/$defs/items", "x-mine": LONG, "$comment": [LONG]},
    ],
)
def test_values_of_right_types_are_taken(tree: Any) -> None:
    assert check_format(JsonSchema(json.dumps(tree)), lambda text: "")
    assert not complain(BYTES, schema_text(tree))


def test_schemas_in_a_lark_and_of_strict_tools_are_looked_at_too() -> None:
    with pytest.raises(BlockyardError) as raised:
        check_format(Lark(f'start: %json {{"type": "object", "required": "{LONG}"}}'), refused_before)
    assert raised.value.violations[0].field == "format.grammar.required"
    tool = ToolSchema("name", json.dumps({"properties": {"a": {"minLength": LONG}}}), strict=True)
    with pytest.raises(BlockyardError) as raised:
        followed(tool, refused_before, "conversation.tools[0].parameters")
    assert raised.value.violations[0].field == "conversation.tools[0].parameters.properties.a.minLength"


def test_a_tool_that_is_not_strict_keeps_what_can_be_followed() -> None:
    properties = {"a": {"type": "string", "minLength": LONG}, "b": {"type": "integer", "minimum": 1}}
    kept = followed(ToolSchema("name", json.dumps({"properties": properties})), lambda text: "")
    assert json.loads(kept.parameters)["properties"] == {"a": {"type": "string"}, "b": properties["b"]}


class Follows:
    """A matcher that compiles, and panics when it is followed: llguidance tells so with its stack."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "panic: the limit is 3\n<backtrace>"

    @staticmethod
    def validate_grammar_with_warnings(text: str, **options: Any) -> tuple[bool, list[str]]:
        return False, []


def test_a_panic_while_it_is_followed_is_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llguidance.LLMatcher", Follows)
    assert complain(BYTES, 'start: "a"') == compiler_process.FAILED


def test_a_panic_is_a_complaint_and_costs_no_process(own: Compilers, started: Started) -> None:
    fine = 'start: "a"'
    assert own.begin().complain(fine) == ""
    panics = schema_text({"type": "object", "required": LONG})
    complaints = {own.begin().complain(f"{panics} // {number}") for number in range(12)}
    assert complaints == {compiler_process.FAILED}
    assert own.begin().complain('start: "b"') == ""
    assert started.number == 1


@pytest.mark.parametrize("tenant", ["a", "b"])
def test_an_innocent_schema_beside_panics_waits_for_no_process(
    tenant: str, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is not known to be wrong reaches llguidance.
    monkeypatch.setattr("gateway.grammars.problems.wrong_keywords", lambda schema, field: iter(()))

    def request(tree: Any, tenant: str) -> GenerationRequest:
        return GenerationRequest("", format=JsonSchema(json.dumps(tree)), tenant=tenant)

    async def run() -> list[Any]:
        checks = GrammarChecks()
        try:
            guilty = [request({"type": "object", "required": f"{LONG}{number}"}, "a") for number in range(12)]
            innocent = request({"type": "integer", "minimum": 7}, tenant)
            asked = [checks.grammar_of(each) for each in (*guilty, innocent)]
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            checks.close()

    *refused, grammar = asyncio.run(run())
    assert [(each.http_status, each.violations[0].field) for each in refused] == [(400, f"{FIELD}.required")] * 12
    assert isinstance(grammar, str)
    assert grammar
    assert started.number <= module.NUM_COMPILERS
