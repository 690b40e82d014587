"""The forms of answers under OpenAI's names, vLLM's and those that vLLM had before."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockyard.contract.request import Choices, JsonObject, JsonSchema, Lark, OutputFormat, Regex
from blockyard.errors import BlockyardError, Violation, invalid
from gateway.fronts.http_calls.bodies import parse_body
from gateway.fronts.openai.call_spec import understand_completion
from gateway.fronts.openai.errors import rename
from gateway.fronts.openai.schema.requests import CompletionBody

SCHEMA = {"type": "object", "properties": {"ö": {}, "b": {}, "a": {}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)


def understand(**parameters: Any) -> tuple[OutputFormat | None, Any]:
    body = parse_body(CompletionBody, json.dumps({"prompt": "a", **parameters}).encode())
    call = understand_completion(body)
    return call.requests[0].format, call.names


@pytest.mark.parametrize(
    ("parameters", "output"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            JsonSchema(TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
            JsonSchema(TEXT),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, JsonSchema(TEXT)),
        ({"structured_outputs": {"json": TEXT, "disable_any_whitespace": True}}, JsonSchema(TEXT, compact=True)),
        ({"structured_outputs": {"json_object": True}}, JsonObject()),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            JsonSchema('{"type": "object"}', compact=True),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choices(("a", "b"))),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Lark('start: "a"')),
        ({"guided_json": SCHEMA}, JsonSchema(TEXT)),
        ({"guided_regex": "a+"}, Regex("a+")),
        ({"guided_choice": ["a", "b"]}, Choices(("a", "b"))),
        ({"guided_grammar": 'start: "a"'}, Lark('start: "a"')),
    ],
    ids=str,
)
def test_a_form_has_many_names(parameters: dict[str, Any], output: OutputFormat | None) -> None:
    assert understand(**parameters)[0] == output


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"json": [SCHEMA]}}, "structured_outputs.json"),
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}}, "response_format": {"type": "json_object"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": ["a"]}, "guided_regex": "a"}, "structured_outputs.choice"),
    ],
    ids=str,
)
def test_what_is_wrong_has_the_callers_name(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        understand(**parameters)
    assert raised.value.violations[0].field == param


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema.not",
        ),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json.not"),
        ({"guided_json": {"not": {}}}, "guided_json.not"),
    ],
    ids=str,
)
def test_the_cores_paths_begin_with_the_callers_name(parameters: dict[str, Any], param: str) -> None:
    _, names = understand(**parameters)
    error = rename(invalid([Violation("format.json_schema.schema.not", "x"), Violation("format", "x")]), names)
    assert error.violations[0].field == param
    assert error.violations[1].field == param.removesuffix(".not")
