"""The parameters that set the answer's format: OpenAI's, vLLM's, and vLLM's former ones."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from blockyard.contract.request import Choices, JsonObject, JsonSchema, Lark, OutputFormat, Regex
from blockyard.errors import Violation, invalid
from blockyard.grammars.limits import MAX_CHOICES
from gateway.fronts.http_calls.body_types import Neutral, NotServed, Shape, at_most


def _check_schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise PydanticCustomError("schema", "should be a JSON Schema: an object")
    return value


def _check_schema_or_text(value: Any) -> Any:
    if not isinstance(value, dict | bool | str | None):
        raise PydanticCustomError("schema", "should be a JSON Schema: an object, or its text")
    return value


# Not a union: pydantic would report an error for each of its types, with paths that no body has.
Schema = Annotated[Any, BeforeValidator(_check_schema, json_schema_input_type=dict[str, Any] | bool)]
SchemaOrText = Annotated[
    Any, BeforeValidator(_check_schema_or_text, json_schema_input_type=str | dict[str, Any] | bool | None)
]
Texts = Annotated[list[str], Field(fail_fast=True), at_most(MAX_CHOICES)]


class SchemaShape(Shape):
    """A JSON Schema. `name` and `description` have no effect. The schema is enforced even if `strict` is false."""

    model_config = ConfigDict(populate_by_name=False)

    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Shape):
    """OpenAI's parameter for the format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaShape | None = None

    @field_validator("json_schema")
    @classmethod
    def _check_json_schema(cls, value: SchemaShape | None, info: Any) -> SchemaShape | None:
        if value is not None and info.data.get("type") != "json_schema":
            raise PydanticCustomError("json_schema", "is only allowed when type is json_schema")
        return value


class StructuredOutputs(Shape):
    """vLLM's parameter for the format of an answer."""

    json_: Annotated[SchemaOrText, Field(alias="json")] = None
    regex: str | None = None
    choice: Texts | None = None
    # A grammar in llguidance's variant of Lark.
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: Annotated[Any, Neutral(False, True)] = None
    disable_additional_properties: Annotated[Any, Neutral(False)] = None
    whitespace_pattern: NotServed = None
    structural_tag: NotServed = None


class FormatShape(Shape):
    """The parameters of a body that set the answer's format."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_json: SchemaOrText = None
    guided_regex: str | None = None


class Asked(NamedTuple):
    """A format that a body asks for.

    Attributes:
        parameter: the body's parameter that sets it.
        field: the core's name for the field with its value.
        output: the format.
    """

    parameter: str
    field: str
    output: OutputFormat


def read_format(body: FormatShape) -> Asked | None:
    """Finds the format that a body asks for; raises BlockyardError FIELD_INVALID if it asks for several."""
    asked = [*_of_response_format(body.response_format), *_of_vllm(body)]
    if len(asked) > 1:
        raise invalid([Violation(each.parameter, f"is not allowed beside {asked[0].parameter}") for each in asked[1:]])
    return asked[0] if asked else None


def _of_response_format(shape: ResponseFormat | None) -> list[Asked]:
    if shape is None or shape.type == "text":
        return []
    if shape.type == "json_object":
        return [Asked("response_format", "format", JsonObject())]
    if shape.json_schema is None:
        raise invalid([Violation("response_format.json_schema", "is required")])
    parameter = "response_format.json_schema.schema"
    return [Asked(parameter, "format.json_schema.schema", JsonSchema(_as_text(shape.json_schema.schema_)))]


def _of_vllm(body: FormatShape) -> list[Asked]:
    shape = body.structured_outputs or StructuredOutputs()
    compact, under = bool(shape.disable_any_whitespace), "structured_outputs"
    asked: list[Asked] = []
    for parameter, schema in ((f"{under}.json", shape.json_), ("guided_json", body.guided_json)):
        if schema is not None:
            asked.append(Asked(parameter, "format.json_schema.schema", JsonSchema(_as_text(schema), compact)))
    for parameter, pattern in ((f"{under}.regex", shape.regex), ("guided_regex", body.guided_regex)):
        if pattern is not None:
            asked.append(Asked(parameter, "format.regex", Regex(pattern)))
    for parameter, texts in ((f"{under}.choice", shape.choice), ("guided_choice", body.guided_choice)):
        if texts is not None:
            asked.append(Asked(parameter, "format.choices.texts", Choices(tuple(texts))))
    for parameter, text in ((f"{under}.grammar", shape.grammar), ("guided_grammar", body.guided_grammar)):
        if text is not None:
            asked.append(Asked(parameter, "format.grammar", Lark(text)))
    if shape.json_object:
        any_object = JsonSchema('{"type": "object"}', compact=True) if compact else JsonObject()
        asked.append(Asked(f"{under}.json_object", "format", any_object))
    return asked


def _as_text(schema: str | dict[str, Any] | bool) -> str:
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
