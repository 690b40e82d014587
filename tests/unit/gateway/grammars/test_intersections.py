"""Small schemas and grammars whose automata would multiply are refused with their path; usual ones are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockyard.contract.request import JsonSchema
from blockyard.errors import BlockyardError, Reason, Violation
from gateway.dialects.answer_parser import ToolSchema
from gateway.grammars.checking import check_format
from gateway.grammars.intersections import find_intersection, multiple_size, pattern_size
from gateway.grammars.larks import check_lark
from gateway.grammars.tools import followed
from tests.kit.oracles.schemas import SCHEMAS

LARGE: dict[str, Any] = {"pattern": "^(a|b){300}c{100}$"}
OTHER: dict[str, Any] = {"pattern": "^(b|c){400}$"}
BOTH = {"allOf": [LARGE, OTHER]}
MANY: dict[str, Any] = {"patternProperties": {f"^{letter}.{{100}}": {} for letter in "abcdef"}}
MULTIPLES = [{"multipleOf": number} for number in (7, 11, 13, 17, 19, 23)]

HOSTILE: list[tuple[Any, str]] = [
    (BOTH, ".allOf[1]"),
    ({**LARGE, **BOTH}, ".allOf[0]"),
    ({"items": {**LARGE, "$ref": "#/$defs/b"}, "$defs": {"b": OTHER}}, ".$defs.b"),
    ({"properties": {"a~/b": {"items": BOTH}}}, ".properties.a~/b.items.allOf[1]"),
    ({"allOf": [{"properties": {"a": LARGE}}, {"properties": {"a": OTHER}}]}, ".allOf[1].properties.a"),
    ({"allOf": [{"items": LARGE}, {"prefixItems": [OTHER]}]}, ".allOf[1].prefixItems[0]"),
    ({"allOf": [{"items": LARGE}, {"items": [OTHER]}]}, ".allOf[1].items[0]"),
    ({"properties": {"a": LARGE}, "patternProperties": {"^b": {}, "^a": OTHER}}, ".patternProperties.^b"),
    ({**LARGE, "anyOf": [{"type": "string"}, OTHER]}, ".anyOf[0]"),
    ({"allOf": [{"anyOf": [LARGE, {}]}, {"anyOf": [{}, OTHER]}]}, ".allOf[1].anyOf[0]"),
    ({"properties": {"a": LARGE}, "oneOf": [{"properties": {"a": OTHER}}, {"type": "null"}]}, ".oneOf[0].properties.a"),
    ({"anyOf": [BOTH, {"type": "null"}]}, ".anyOf[0].allOf[1]"),
    ({"pattern": "^" + "a" * 3000, "format": "email"}, ""),
    ({"multipleOf": 1000003}, ""),
    ({"type": "number", "multipleOf": 1000.003}, ""),
    ({"multipleOf": 1e300}, ""),
    ({"allOf": MULTIPLES}, ".allOf[4]"),
    ({"additionalProperties": MANY}, ".additionalProperties"),
    ({"allOf": [{"patternProperties": {pattern: {}}} for pattern in MANY["patternProperties"]]}, ".allOf[4]"),
]

USUAL: list[Any] = [
    *SCHEMAS,
    {"type": "string", "format": "email", "pattern": "@example\\.com$", "maxLength": 100_000},
    {"anyOf": [{"pattern": "a{600}"}] * 300},
    {"properties": {name: {"pattern": "a{300}"} for name in "abc"}, "patternProperties": {"^x": {"pattern": "b{300}"}}},
    {"allOf": [{"$ref": "#/$defs/a"}] * 20, "$defs": {"a": LARGE}},
    {"$ref": "#", "anyOf": [{"$ref": "#"}, {"$ref": "#/anyOf/7"}, {"$ref": "#/no/where"}]},
    {"properties": {"next": {"$ref": "#"}}, "anyOf": [{"properties": {"next": {"type": "object"}}}, LARGE]},
    {"type": "number", "multipleOf": 0.01},
    {"multipleOf": 1_000_000},
    {"multipleOf": True, "pattern": 3, "allOf": {}, "properties": [], "$ref": 4, "patternProperties": None},
    {"properties": {f"p{place}": {"type": "string", "format": "date"} for place in range(4000)}},
    True,
]


@pytest.mark.parametrize(("schema", "path"), HOSTILE)
def test_what_multiplies_is_told_with_its_path(schema: Any, path: str) -> None:
    found = find_intersection(schema, "schema")
    assert found is not None
    assert (found.field, found.reason) == (f"schema{path}", Reason.GRAMMAR_TOO_COMPLEX)
    with pytest.raises(BlockyardError) as raised:
        check_format(JsonSchema(json.dumps(schema)), lambda text: "")
    assert [each.field for each in raised.value.violations] == [f"format.json_schema.schema{path}"]


@pytest.mark.parametrize("schema", USUAL)
def test_usual_schemas_are_small(schema: Any) -> None:
    assert find_intersection(schema, "schema") is None


def test_schemas_that_meet_without_end_are_refused() -> None:
    doubling = {str(place): {"anyOf": [{"$ref": f"#/$defs/{place + 1}"}] * 2} for place in range(40)}
    tree = {"pattern": "a", "$ref": "#/$defs/0", "$defs": {**doubling, "40": {"pattern": "b"}}}
    assert find_intersection(tree, "") is not None
    endless = {"pattern": "a", "anyOf": [{"$ref": "#"}]}
    assert find_intersection(endless, "") is not None


def test_sizes() -> None:
    sizes = {"": 1, "abc": 3, "a{3}": 3, "(ab){2,5}": 10, "[^a-z]{0,3}\\d*": 4, "(?:a(b|c){10}){2,}x": 43, "((": 1}
    sizes |= {"(((a{1000}){1000}){1000}){1000}": 10**9, "a{99999999999999999999}": 999_999_999, "[]a]b)": 2}
    assert {pattern: pattern_size(pattern) for pattern in sizes} == sizes
    numbers = {7: 7, 7.5: 5, 1000: 7, 0.01: 1, 99991: 99991, 1e-300: 1, float("inf"): 10**9, 0: 10**9}
    assert {number: multiple_size(number) for number in numbers} == numbers


def lark_refusal(text: str) -> Violation:
    with pytest.raises(BlockyardError) as raised:
        check_lark(text, "grammar")
    [violation] = raised.value.violations
    return violation


@pytest.mark.parametrize(
    "text",
    [
        "start: A\nA: /a.*/ & /.*b/",
        "start: A\nA: /a.*/ & B\nB: /b/",
        "start: A\nA: /a.*/ & (~/b/)",
        "start: A\nA: ~B\nB: /a/",
        "start: A\nA: ~ # why\n (/a/)",
        "start: A\nA: ~/a{500}/ | ~/b{500}/",
        f"start: %json {json.dumps(BOTH)}",
        f"start: %lark {{\nstart: @x %json{json.dumps(BOTH)} /a/\n}}",
        'start: "a" %llguidance {} %json {"multipleOf": 1000003}',
        json.dumps({"grammars": [{"lark_grammar": "start: A\nA: /a/ & /b/"}]}),
        json.dumps({"grammars": [{}, {"json_schema": BOTH}]}),
    ],
)
def test_grammars_that_multiply_are_refused(text: str) -> None:
    assert lark_refusal(text).reason is Reason.GRAMMAR_TOO_COMPLEX


def test_what_grammars_hold_is_checked_as_by_itself() -> None:
    assert lark_refusal('start: %json {"$ref": "https://a"}') == Violation(
        "grammar.$ref", "must refer to a place in this schema: other schemas are not fetched"
    )
    assert lark_refusal("start: %json [").reason is Reason.FIELD_INVALID
    assert lark_refusal('start: %json {"items": {"$id": "a"}}').field == "grammar.items.$id"


@pytest.mark.parametrize(
    "text",
    [
        "start: A\nA: /(?s:.*)/ & ~/(?s:.*)(a|b)(?s:.*)/",
        'start: A ~ 3 B~1..4 /[&~]/ "& ~" // & B\n# ~B\nA: /a/\nB: "b"',
        'start: %json {"pattern": "a & ~b"} <|end|>',
        "{",
        '{"grammars": 3}',
        '{"grammars": [3, {"lark_grammar": 3}]}',
    ],
)
def test_other_grammars_are_passed_on(text: str) -> None:
    check_lark(text, "grammar")


def test_tools_are_held_to_the_same_counts() -> None:
    parameters = json.dumps({"properties": {"a": BOTH, "b": {"type": "integer"}}})
    kept = json.loads(followed(ToolSchema("f", parameters), lambda text: "").parameters)
    # A part without a type has none of its own.
    assert kept["properties"] == {"a": {}, "b": {"type": "integer"}}
    with pytest.raises(BlockyardError, match=r"tools\.properties\.a\.allOf\[1\]: tool 'f': too complex"):
        followed(ToolSchema("f", parameters, strict=True), lambda text: "")
