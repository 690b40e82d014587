"""The blocks of messages as the Anthropic API takes them. Owns their shape, and which kinds are served."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from blockyard.contract import chat
from gateway.fronts.http_calls.body_types import BY_TYPE, Neutral, NotServed, Shape, at_most, unsupported

# Begins a line of the system's texts that is for a provider, not for a model. It changes with every request, and prefix
# caches would end before it.
_BILLING = "x-anthropic-billing-header:"
# The roles in which each type of block is allowed. Other types of the API are not supported.
_IN_TEXT = frozenset({"text"})
IN_MESSAGES = frozenset({"text", "thinking", "redacted_thinking", "tool_use", "tool_result"})


class Block(Shape):
    """The fields that all blocks share. The prefix cache needs no request."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """A text. Citations come from documents, which are not served."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, Neutral([])] = None


class ThinkingBlock(Block):
    """The reasoning of an earlier answer. It has no signature here."""

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
    """Makes blocks of a text, and refuses blocks of other kinds by name. `block`: the type of one."""

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
    """The result of a tool. An error is only marked by its text."""

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
    """Makes one content of texts; None where there are none."""
    return chat.join_parts([block.text for block in texts])


def join_system_texts(texts: list[TextBlock]) -> str | None:
    """Makes one content of the system's texts, without the lines for a provider that begin them."""
    stripped = (_without_billing(block.text) for block in texts)
    return chat.join_parts([text for text in stripped if text is not None])


def _without_billing(text: str) -> str | None:
    """Leaves out a text's first line if it is for a provider; None: there is nothing else."""
    return text.partition("\n")[2] or None if text.startswith(_BILLING) else text
