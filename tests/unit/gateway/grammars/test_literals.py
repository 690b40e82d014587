"""What grammars of calls in literals of Python's and Gemma's form allow is read again, and fits the tool's schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from blockyard.errors import BlockyardError, Reason
from gateway.dialects.answer_parser import ToolSchema
from gateway.dialects.dialect import AnswerContext
from gateway.dialects.table import BY_NAME
from gateway.grammars.calls import write_calls
from tests.unit.gateway.dialects.reading import read
from tests.unit.gateway.grammars.test_calls import vocabulary

DIALECTS = ("gemma", "function_gemma", "lfm2", "olmo3", "pythonic")
TEXT: dict[str, Any] = {"type": "string", "maxLength": 12}
TREE = {
    "type": "object",
    "properties": {"Name": TEXT, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}},
    "required": ["Name"],
    "additionalProperties": False,
}
# Of the properties of a tool's schema.
SCHEMAS: dict[str, dict[str, Any]] = {
    "scalars": {"b": {"type": "boolean"}, "n": {"type": "null"}, "x": {"type": "integer", "minimum": 3, "maximum": 99}},
    "texts": {"b": {**TEXT, "minLength": 2}, "A": TEXT, "a key": TEXT},
    "choices": {"e": {"enum": ["a", 'b "c"\n', 1.5, None, True, [1, {"k": "v"}]]}, "c": {"const": {"deep": [False]}}},
    "lists": {
        "l": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
        "empty": {"type": "array", "maxItems": 0},
        "open": {"type": "array", "items": {"type": "null"}},
    },
    "branches": {
        "a": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "null"}], "default": None},
        "t": {"type": ["string", "boolean"], "maxLength": 3},
        "r": {"allOf": [{"$ref": "#/$defs/tree"}], "description": "a tree"},
    },
    "objects": {
        "o": {"type": "object", "properties": {"x": {"type": "boolean"}, "y": TREE}, "required": ["y"]},
        "free": {"type": "object", "additionalProperties": {"type": "boolean"}, "title": "any"},
        "tree": {"$ref": "#/$defs/tree"},
    },
}


def tool_of(properties: dict[str, Any], *, required: list[str], strict: bool = True) -> ToolSchema:
    schema = {"type": "object", "properties": properties, "required": required, "$defs": {"tree": TREE}}
    return ToolSchema("f", json.dumps(schema), strict)


def grammar_of(dialect: str, tool: ToolSchema, *, special: bool) -> str:
    context = AnswerContext(BY_NAME[dialect], special_ids=vocabulary(dialect, special).special_ids)
    return write_calls(context, (tool,), must_call=True, one_call=True)


@pytest.mark.parametrize(
    ("dialect", "special"), [*((dialect, True) for dialect in DIALECTS), ("gemma", False), ("function_gemma", False)]
)
def test_whatever_a_model_writes_fits_the_schema(dialect: str, special: bool) -> None:
    words, chance = vocabulary(dialect, special), random.Random(dialect)
    num_whole = 0
    for name, properties in SCHEMAS.items():
        for required in ([], [*properties][:1], [*properties]):
            tool = tool_of(properties, required=required)
            answer = words.write(grammar_of(dialect, tool, special=special), chance)
            if answer is None:
                continue
            num_whole += 1
            schema = json.loads(tool.parameters)
            found = read(dialect, [answer], tools={"f": json.dumps(schema)})
            assert (found.num_calls, found.num_invalid, found.text) == (1, 0, ""), f"{name}: {answer}"
            jsonschema.validate(json.loads(found.calls[0][2]), schema)
    assert num_whole >= 6


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_does_not_fit_the_schema_cannot_be_written(dialect: str) -> None:
    words = vocabulary(dialect, True)
    calls = BY_NAME[dialect].calls
    assert calls is not None
    form, quote = calls.template, calls.quote or '"'
    is_gemma = calls.quote != ""
    equals, comma, yes = (":", ",", "true") if is_gemma else ("=", ", ", "True")
    tool = tool_of({"a": {**TEXT, "minLength": 2}, "b": {"type": "boolean"}, "c": TREE}, required=["b"])
    grammar = grammar_of(dialect, tool, special=True)
    name = "Name:" if is_gemma else '"Name": '
    tree = f"c{equals}{{{name}{quote}x{quote}}}"
    text = f"a{equals}{quote}ab{quote}"
    flag = f"b{equals}{yes}"
    for arguments, allowed in (
        ((flag,), True),
        ((text, flag), True),
        ((text, flag, tree), True),
        ((flag, tree), True),
        ((text,), False),
        ((), False),
        ((flag, text), False),
        ((flag, flag), False),
        ((f"b{equals}1",), False),
        ((text.replace("ab", "a"), flag), False),
        ((flag, f"c{equals}{{}}"), False),
        ((flag, f"d{equals}{yes}"), False),
    ):
        answer = f"{form.opens}{form.before}f{form.middle}{comma.join(arguments)}{form.after}{form.shuts}"
        assert words.allows(grammar, answer) == allowed, answer


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_tool_that_says_nothing_of_its_arguments_is_called_with_any(dialect: str) -> None:
    words, chance = vocabulary(dialect, True), random.Random(1)
    for parameters in ("", '{"type": "object"}', '{"properties": {"x": {}}, "required": ["x", "y"]}'):
        grammar = grammar_of(dialect, ToolSchema("f", parameters), special=True)
        answers = [words.write(grammar, chance) for _ in range(3)]
        for answer in filter(None, answers):
            assert read(dialect, [answer]).num_calls == 1, answer
        assert any(answers)


@pytest.mark.parametrize(
    ("part", "keyword", "of_python"),
    [
        ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, "allOf", True),
        ({"type": "array", "prefixItems": [{"type": "null"}]}, "prefixItems", True),
        ({"type": "object", "patternProperties": {"^a": {}}}, "patternProperties", True),
        ({"type": "string", "pattern": "^a+$"}, "pattern", False),
        ({"type": "string", "format": "date"}, "format", False),
    ],
)
def test_what_literals_cannot_follow_is_refused_of_strict_tools_alone(
    part: dict[str, Any], keyword: str, of_python: bool
) -> None:
    for dialect in DIALECTS:
        tool = tool_of({"x": part}, required=[])
        if of_python or "gemma" in dialect:
            form = "Gemma's" if "gemma" in dialect else "Python's"
            with pytest.raises(
                BlockyardError, match=f"the keyword {keyword} of tool 'f' cannot be enforced in calls of {form} form"
            ):
                grammar_of(dialect, tool, special=True)
        else:
            assert grammar_of(dialect, tool, special=True)
        assert grammar_of(dialect, tool._replace(strict=False), special=True)


def test_a_text_of_python_follows_its_pattern() -> None:
    words = vocabulary("pythonic", True)
    grammar = grammar_of(
        "pythonic", tool_of({"x": {"type": "string", "pattern": "^a+$"}}, required=["x"]), special=True
    )
    assert words.allows(grammar, '[f(x="aa")]')
    assert not words.allows(grammar, '[f(x="ab")]')


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_references_that_lead_too_deep_are_refused(dialect: str, strict: bool) -> None:
    inner = {f"a{place}": {"properties": {"b": {"$ref": f"#/$defs/a{place + 1}"}}} for place in range(400)}
    schema = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": {**inner, "a400": TEXT}}
    with pytest.raises(BlockyardError, match="tool 'f' is too complex") as raised:
        grammar_of(dialect, ToolSchema("f", json.dumps(schema), strict), special=True)
    assert [violation.reason for violation in raised.value.violations] == [Reason.GRAMMAR_TOO_COMPLEX]
