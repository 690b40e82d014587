"""The bodies of /v1/responses and /v1/responses/input_tokens: names, types, and unsupported parameters.

There are four kinds of parameters, as in `gateway.fronts.openai.schema.requests`: parameters that work; parameters that
are accepted without an effect; parameters of the API that are not supported, whose use is an error; and unknown
parameters, which are errors too.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from blockyard.contract.request import JsonObject, OutputFormat
from gateway.fronts.http_calls.body_types import Neutral, NotServed, Shape, at_most, schema_format, unsupported
from gateway.fronts.openai.schema.requests import MAX_METADATA, CacheSalt
from gateway.fronts.responses.items import Items  # noqa: TC001 - pydantic reads the annotations
from gateway.fronts.responses.tools import Tools, check_tool_choice

LOGPROBS = "message.output_text.logprobs"
# Reasoning is not encrypted here: it is returned and accepted as plain text.
_SERVED_INCLUDES = frozenset({LOGPROBS, "reasoning.encrypted_content"})
_STATELESS = "is not supported, since answers are not stored: send the earlier items of the conversation in input"


def _check_include(value: Any) -> Any:
    for name in value if isinstance(value, list) else ():
        if isinstance(name, str) and name not in _SERVED_INCLUDES:
            raise unsupported(f"{name!r} is not supported")
    return value


class ReasoningShape(Shape):
    """How much the model reasons; `effort` goes to the chat template. All reasoning is returned, without a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Annotated[Any, Neutral("auto")] = None
    mode: Annotated[Any, Neutral("standard")] = None


class FormatShape(Shape):
    """The format of the answer. A schema is enforced even if `strict` is false."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError("format", "must have a schema if its type is 'json_schema', and only then")
        return self

    def as_format(self) -> OutputFormat | None:
        if self.json_schema is not None:
            return schema_format(self.json_schema)
        return JsonObject() if self.type == "json_object" else None


class TextShape(Shape):
    """How the answer is written."""

    format: FormatShape | None = None
    verbosity: Annotated[Any, Neutral("medium")] = None


class StreamOptions(Shape):
    """Options of a stream."""

    include_obfuscation: Annotated[Any, Neutral(False)] = None


class PromptShape(Shape):
    """The fields that determine the prompt, and parameters that need stored responses, which are not supported."""

    model: str | None = None
    instructions: str | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningShape | None = None
    text: TextShape | None = None
    tool_choice: Annotated[Any, BeforeValidator(check_tool_choice)] = None
    tools: Tools = None

    conversation: Annotated[Any, Neutral(message=_STATELESS)] = None
    previous_response_id: Annotated[Any, Neutral(message=_STATELESS)] = None
    truncation: Annotated[Any, Neutral("disabled")] = None


class InputTokensBody(PromptShape):
    """The body of /v1/responses/input_tokens."""

    input: Items | None = None

    personality: NotServed = None


class ResponseBody(PromptShape):
    """The body of /v1/responses."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "user",
        }
    )

    input: Items
    background: bool | None = None
    include: Annotated[list[str], Field(fail_fast=True), BeforeValidator(_check_include)] | None = None
    max_output_tokens: int | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    store: Annotated[Any, Neutral(False, message=_STATELESS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    # vLLM's parameter.
    cache_salt: CacheSalt | None = None

    # Parameters that label a request, tune features that work automatically here, or limit tools that are not
    # supported. Codex sends client_metadata.
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    user: str | None = None

    access_programs: NotServed = None
    background_options: NotServed = None
    context_management: Annotated[Any, Neutral([])] = None
    image: NotServed = None
    moderation: NotServed = None
    prompt: NotServed = None


class TokenizeInputBody(ResponseBody):
    """The body of /tokenize for a response: any body of /v1/responses."""

    return_token_strs: bool | None = None
