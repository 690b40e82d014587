"""The messages and tools of a chat in OpenAI's form, and their conversion to a conversation.

Checks names and types. `gateway.chat` has the rules of a conversation, for all fronts.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from blockyard.contract import chat
from blockyard.contract.chat import Role, ToolChoice
from gateway.chat import effort_arguments
from gateway.fronts.http_calls.body_types import Neutral, NotServed, Shape, at_most, unsupported


class TextPart(Shape):
    """A part of a message's content; only text is supported.

    Parameters for the prefix cache have no effect: it always works.
    """

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"cache_control", "prompt_cache_breakpoint"})

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = None
    # Anthropic's name for the same parameter; agents send it to every API.
    cache_control: dict[str, Any] | None = None


def _is_text(part: dict[str, Any]) -> bool:
    marks = part.keys() & TextPart.WITHOUT_EFFECT
    if part.keys() - marks != {"type", "text"} or not isinstance(part["text"], str):
        return False
    return all(part[mark] is None or isinstance(part[mark], dict) for mark in marks)


def _join_content(value: Any) -> Any:
    """Joins the parts of a message's content into one text."""
    if not isinstance(value, list):
        return value
    if len(value) > chat.MAX_PARTS:
        raise PydanticCustomError("too_many", "has more than {limit} parts", {"limit": chat.MAX_PARTS})
    for part in value:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise unsupported("has parts other than text, which are not supported yet")
        if not (isinstance(part, dict) and _is_text(cast("dict[str, Any]", part))):
            raise PydanticCustomError("content", "should be a string or a list of text parts")
    return chat.join_parts([part["text"] for part in value])


_Content = Annotated[str | None, BeforeValidator(_join_content, json_schema_input_type=str | list[TextPart] | None)]


class PredictedContent(Shape):
    """A text that an answer may repeat in part."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_join_content, json_schema_input_type=str | list[TextPart])]


def _check_kind(value: Any) -> Any:
    """Refuses tools and calls whose type is not `function`; the error names the type."""
    kind = cast("dict[str, Any]", value).get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise unsupported(f"the type {kind!r} is not supported: functions are")
    return value


_OfFunction = BeforeValidator(_check_kind)


def _check_role(value: Any) -> Any:
    if value == "function":
        raise unsupported("'function' is not supported: use 'tool'")
    return value


class FunctionCall(Shape):
    """A function that the model has called."""

    name: str
    arguments: str


class RequestToolCall(Shape):
    """A tool call in an assistant's message. Clients that join the pieces of a stream may leave `index` in it."""

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"index"})

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def as_call(self) -> chat.ToolCall:
        return chat.ToolCall(self.function.name, self.function.arguments, self.id)


class RequestMessage(Shape):
    """One message of a chat. The role `developer` is a newer name for `system`, under which templates get it.

    Clients send messages of answers back: litellm adds `provider_specific_fields`, OpenAI's package `annotations`.
    """

    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset({"provider_specific_fields"})

    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], BeforeValidator(_check_role)]
    content: _Content = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: (
        Annotated[list[Annotated[RequestToolCall, _OfFunction]], Field(fail_fast=True), at_most(chat.MAX_TOOLS)] | None
    ) = None
    tool_call_id: str | None = None
    provider_specific_fields: dict[str, Any] | None = None
    annotations: Annotated[Any, Neutral([])] = None
    audio: NotServed = None
    function_call: NotServed = None
    refusal: Annotated[Any, Neutral("")] = None

    @model_validator(mode="before")
    @classmethod
    def _read_reasoning(cls, value: Any) -> Any:
        """Accepts `reasoning`, vLLM's newer name for `reasoning_content`: clients send back answers with both names."""
        if not (isinstance(value, dict) and "reasoning" in value):
            return value
        fields = cast("dict[str, Any]", value)
        named = {name: item for name, item in fields.items() if name != "reasoning"}
        return {"reasoning_content": fields["reasoning"]} | named

    def as_message(self) -> chat.Message:
        return chat.Message(
            Role(self.role),
            self.content,
            name=self.name,
            tool_calls=tuple(call.as_call() for call in self.tool_calls or ()),
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content,
        )


class Function(Shape):
    """A function that the model may call. `parameters`: a JSON Schema; `strict` enforces it on the arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class RequestTool(Shape):
    """A tool that the chat template shows to the model."""

    type: Literal["function"]
    function: Function

    def as_tool(self) -> chat.Tool:
        function = self.function
        parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
        return chat.Tool(function.name, function.description or "", parameters, strict=bool(function.strict))


class FunctionName(Shape):
    """The name of a function."""

    name: str


class NamedTool(Shape):
    """A tool by its name: the tool that the model must call, or one of the allowed tools."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Shape):
    """The tools that the model may call (`auto`) or must call one of (`required`). The prompt shows all tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), at_most(chat.MAX_TOOLS)]


class AllowedToolChoice(Shape):
    """A tool choice that allows several tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _read_tool_choice(value: Any) -> Any:
    # Not a union: pydantic would report a violation for each of its branches.
    if value is None or value in ("none", "auto", "required"):
        return value
    fields = cast("dict[str, Any]", value) if isinstance(value, dict) else {}
    is_several = fields.get("type") == "allowed_tools"
    if is_several:
        inner = fields.get("allowed_tools")
        named = cast("dict[str, Any]", inner).get("tools") if isinstance(inner, dict) else None
        for each in cast("list[Any]", named)[: chat.MAX_TOOLS] if isinstance(named, list) else ():
            _check_kind(each)
    else:
        _check_kind(value)
    try:
        return (AllowedToolChoice if is_several else NamedTool).model_validate(value)
    except ValidationError:
        one = "{'type': 'function', 'function': {'name': …}}"
        several = f"{{'type': 'allowed_tools', 'allowed_tools': {{'mode': 'auto' or 'required', 'tools': [{one}, …]}}}}"
        message = several if is_several else f"'none', 'auto', 'required', {one} or {several}"
        raise PydanticCustomError("tool_choice", "should be {form}", {"form": message}) from None


_ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice | None


def _chosen(choice: Any) -> tuple[ToolChoice, str, tuple[str, ...]]:
    """Reads a tool choice. Returns the choice, the name of the tool to call, and the names of the allowed tools."""
    match choice:
        case NamedTool():
            return ToolChoice.REQUIRED, choice.function.name, ()
        case AllowedToolChoice():
            allowed = choice.allowed_tools
            return ToolChoice(allowed.mode), "", tuple(tool.function.name for tool in allowed.tools)
        case _:
            return ToolChoice(choice or "auto"), "", ()


class ChatShape(Shape):
    """The fields that determine the prompt of a chat."""

    # If several messages are invalid, only the first is reported.
    messages: Annotated[
        list[RequestMessage], Field(fail_fast=True, json_schema_extra={"minItems": 1}), at_most(chat.MAX_MESSAGES)
    ]
    tools: (
        Annotated[list[Annotated[RequestTool, _OfFunction]], Field(fail_fast=True), at_most(chat.MAX_TOOLS)] | None
    ) = None
    tool_choice: Annotated[Any, BeforeValidator(_read_tool_choice, json_schema_input_type=_ToolChoice)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    # Only the operator sets the template: it runs in the gateway, in a sandbox that does not limit its time.
    chat_template: Annotated[
        Any, Neutral(message="cannot be set by a request; the gateway's --chat-template sets it")
    ] = None
    media_io_kwargs: NotServed = None
    mm_processor_kwargs: NotServed = None

    def conversation(self) -> chat.Conversation:
        documents = {} if self.documents is None else {"documents": self.documents}
        choice, named, allowed = _chosen(self.tool_choice)
        return chat.Conversation(
            messages=tuple(message.as_message() for message in self.messages),
            tools=tuple(tool.as_tool() for tool in self.tools or ()),
            tool_choice=choice,
            named_tool=named,
            allowed_tools=allowed,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            template_arguments={
                **documents,
                **effort_arguments(self.reasoning_effort),
                **(self.chat_template_kwargs or {}),
            },
        )
