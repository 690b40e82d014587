"""The bodies of /v1/messages and /v1/messages/count_tokens: names, types, and unsupported parameters.

There are four kinds of parameters, as in `gateway.fronts.openai.schema.requests`: parameters that work; parameters that
are accepted without an effect; parameters of the API that are not supported, whose use is an error; and unknown
parameters, which are errors too.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from blockyard.contract import chat
from gateway.fronts.anthropic.blocks import Content, Texts  # noqa: TC001 - pydantic reads the annotations
from gateway.fronts.http_calls.body_types import Neutral, NotServed, Shape, at_most, unsupported

# The prefix of edits that have no effect here: the chat template itself leaves out earlier thinking.
_HARMLESS_EDITS = "clear_thinking_"


class MessageShape(Shape):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Content
    clear_at: NotServed = None
    output_config: NotServed = None


def _check_tool(value: Any) -> Any:
    """Refuses tools that Anthropic's servers run; the error names their type."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise unsupported(f"is of the type {kind!r}, which is not supported: only tools with an input_schema are")
    return value


class ToolShape(Shape):
    """A tool that the client runs."""

    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    # No effect: arguments are always streamed while the model writes them.
    eager_input_streaming: bool | None = None
    allowed_callers: Annotated[Any, Neutral(["direct"])] = None
    defer_loading: Annotated[Any, Neutral(False)] = None
    input_examples: Annotated[Any, Neutral([])] = None

    def as_tool(self) -> chat.Tool:
        schema = json.dumps(self.input_schema, ensure_ascii=False)
        return chat.Tool(self.name, self.description or "", schema, strict=bool(self.strict))


class ToolChoiceShape(Shape):
    """Whether the model may call tools, must call one, or must not."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise PydanticCustomError("tool_choice", "must have a name if its type is 'tool', and only then")
        return self


def _check_thinking(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "between_tools":
        raise unsupported("the type 'between_tools' is not supported")
    return value


def _check_display(value: Any) -> Any:
    if value == "updates":
        raise unsupported("the kind 'updates' is not supported")
    return value


class ThinkingShape(Shape):
    """Whether the model reasons before it answers, and the most tokens of its reasoning."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Annotated[Literal["summarized", "omitted"] | None, BeforeValidator(_check_display)] = None
    block_binding: NotServed = None


class OutputFormat(Shape):
    """The format of an answer: JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Shape):
    """How the answer is written. `effort` goes to the chat template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: NotServed = None


def _check_edits(value: Any) -> Any:
    """Accepts edits that have no effect here, and refuses other edits; the error names them."""
    edits = value.get("edits") or [] if isinstance(value, dict) else None
    if not isinstance(edits, list):
        raise PydanticCustomError("context_management", "should be an object with a list of edits")
    for edit in edits:
        kind = edit.get("type") if isinstance(edit, dict) else edit
        if not (isinstance(kind, str) and kind.startswith(_HARMLESS_EDITS)):
            raise unsupported(f"has an edit {kind!r}, which is not supported")
    return value


class PromptShape(Shape):
    """The fields that determine the prompt."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {"betas", "cache_control", "context_management", "diagnostics", "user_profile_id", "workspace_id"}
    )

    model: str
    messages: Annotated[
        list[MessageShape], Field(fail_fast=True, json_schema_extra={"minItems": 1}), at_most(chat.MAX_MESSAGES)
    ]
    system: Texts | None = None
    tools: (
        Annotated[
            list[Annotated[ToolShape, BeforeValidator(_check_tool)]], Field(fail_fast=True), at_most(chat.MAX_TOOLS)
        ]
        | None
    ) = None
    tool_choice: ToolChoiceShape | None = None
    thinking: Annotated[ThinkingShape | None, BeforeValidator(_check_thinking)] = None
    output_config: OutputConfig | None = None
    # The former name of output_config.format.
    output_format: OutputFormat | None = None

    # Parameters that label a request, or tune features that work automatically here.
    betas: Annotated[list[str], Field(fail_fast=True)] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: Annotated[dict[str, Any], BeforeValidator(_check_edits)] | None = None
    diagnostics: dict[str, Any] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    billing_policy: NotServed = None
    compaction: NotServed = None
    container: NotServed = None
    fallback_credit_token: NotServed = None
    fallbacks: Annotated[Any, Neutral([])] = None
    inference_geo: NotServed = None
    mcp_servers: Annotated[Any, Neutral([])] = None
    speed: Annotated[Any, Neutral("standard")] = None
    thread: NotServed = None


def _check_length(value: int) -> int:
    if value < 1:
        raise PydanticCustomError("max_tokens", "must be at least 1, not {value}", {"value": value})
    return value


class MessagesBody(PromptShape):
    """The body of /v1/messages. `max_tokens` is reduced if the model's length leaves less room."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = PromptShape.WITHOUT_EFFECT | {"metadata", "service_tier"}

    max_tokens: Annotated[int, AfterValidator(_check_length), Field(json_schema_extra={"minimum": 1})]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


class CountBody(PromptShape):
    """The body of /v1/messages/count_tokens."""


class TokenizeMessagesBody(MessagesBody):
    """The body of /tokenize for messages: any body of /v1/messages."""

    return_token_strs: bool | None = None
