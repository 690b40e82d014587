"""The content blocks of messages in the Anthropic API: their names and types, and the supported kinds."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from blockyard.contract import chat
from gateway.fronts.http_calls.body_types import BY_TYPE, Neutral, NotServed, Shape, at_most, unsupported

# The beginning of a line in system texts that is meant for Anthropic's billing, not for the model. The line changes
# with every request, so that the prefix cache would end before it.
_BILLING = "x-anthropic-billing-header:"
# The types of blocks that system texts and tool results, and messages, may have. Other types are not supported.
_IN_TEXT = frozenset({"text"})
IN_MESSAGES = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


class Block(Shape):
    """The fields that all blocks share. `cache_control` has no effect: the prefix cache always works."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """A text. Citations refer to documents, which are not supported."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, Neutral([])] = None


class ThinkingBlock(Block):
    """The reasoning of an earlier answer. Its signature is ignored."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block):
    """Encrypted reasoning of another provider's model, which cannot be read here."""

    type: Literal["redacted_thinking"]
    data: str = ""


class ToolUseBlock(Block):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: Annotated[Any, Neutral({"type": "direct"})] = None
    toolset_name: NotServed = None

    def as_call(self) -> chat.ToolCall:
        return chat.ToolCall(self.name, json.dumps(self.input, ensure_ascii=False), self.id)


def _check_kinds(kinds: frozenset[str], block: Any) -> BeforeValidator:
    """Turns a text into a list of one block, and refuses blocks of unsupported kinds; the error names the kind.

    `block`: the type of a block, for the OpenAPI document.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return [{"type": "text", "text": value}]
        if not isinstance(value, list):
            raise PydanticCustomError("content", "should be a string or a list of blocks")
        for block in cast("list[Any]", value):
            kind = cast("dict[str, Any]", block).get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                raise unsupported(f"has a block of the type {kind!r}, which is not supported")
        return cast("Any", value)

    return BeforeValidator(check, json_schema_input_type=str | list[block])


Texts = Annotated[list[TextBlock], Field(fail_fast=True), at_most(chat.MAX_PARTS), _check_kinds(_IN_TEXT, TextBlock)]


class ToolResultBlock(Block):
    """The result of a tool. `is_error` has no effect: the model only sees the text."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    toolset_name: NotServed = None


_AnyBlock = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    BY_TYPE,
]
Content = Annotated[
    list[_AnyBlock], Field(fail_fast=True), at_most(chat.MAX_PARTS), _check_kinds(IN_MESSAGES, _AnyBlock)
]


def join_texts(texts: list[TextBlock]) -> str | None:
    """Joins text blocks into one content; None if there are none."""
    return chat.join_parts([block.text for block in texts])


def join_system_texts(texts: list[TextBlock]) -> str | None:
    """Joins system texts into one content, without the billing lines at their beginning."""
    stripped = (_without_billing(block.text) for block in texts)
    return chat.join_parts([text for text in stripped if text is not None])


def _without_billing(text: str) -> str | None:
    """Removes a text's first line if it is a billing line; returns None if nothing else is left."""
    return text.partition("\n")[2] or None if text.startswith(_BILLING) else text
