"""A conversation: messages, the tools that the model may call, and the calls that it makes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of the content of one message."""
MAX_TOOLS = 1024
"""Tools of a conversation, and calls of tools in one message."""
MAX_PIECES = 2**14
"""Parts of messages and calls of tools, in all."""
MAX_ARGUMENTS_BYTES = 2**20
"""Bytes of the encoded template arguments."""


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    """Newer models' name for the system role; the chat template is given it as `system`."""
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolChoice(StrEnum):
    AUTO = "auto"
    """The model decides."""
    NONE = "none"
    """The model sees no tool."""
    REQUIRED = "required"
    """The model calls at least one tool."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the assistant has made. `arguments`: as the model wrote them, usually JSON."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is one text, or several parts that are joined by newlines.

    Args:
        role: a Role, or its name. In a decoded message an unknown role is empty.
        content: None if the message has only tool calls.
        name: the author's name if a role has several, or the tool's.
        tool_calls: the assistant's tool calls.
        tool_call_id: the id of the call that this message answers.
        reasoning_content: the assistant's reasoning before the message, for templates that show it.
    """

    role: Role | str
    content: str | Sequence[str] | None = None
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @property
    def text(self) -> str | None:
        """The content as one text; None if there is none."""
        return self.content if self.content is None or isinstance(self.content, str) else join_parts(self.content)


def join_parts(parts: Sequence[str]) -> str | None:
    """Joins the parts of a content by newlines; None if there are none."""
    return "\n".join(parts) if parts else None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. Its arguments always follow its schema if it is `strict`.

    Args:
        name: its name.
        description: what it does, for the model to read.
        parameters: a JSON schema, as a value or as text; None or an empty text for none.
        strict: whether every call follows the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | str | None = None
    strict: bool = False

    @property
    def schema(self) -> str:
        """The parameters as the text of a JSON schema; empty if there are none."""
        given = self.parameters
        if given is None or isinstance(given, str):
            return given or ""
        return json.dumps(given, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt in messages, which the model's chat template turns into one text.

    Attributes:
        messages: the messages, oldest first.
        tools: the tools that the chat template shows to the model.
        tool_choice: None for a value of a later version that this one does not know.
        add_generation_prompt: end the prompt with the beginning of an assistant message; None: unless a message is
            continued.
        continue_final_message: the answer continues the last message.
        template_arguments: extra variables of the chat template.
        parse_answer: split reasoning and tool calls from the answer's text.
        named_tool: with REQUIRED, the tool that the model calls; empty: any.
        one_tool_call: the model calls at most one tool.
        allowed_tools: names of the tools that the model may call, though it sees all; empty: all. The public API's
            messages do not have it.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = ToolChoice.AUTO
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    parse_answer: bool = False
    named_tool: str = ""
    one_tool_call: bool = False
    allowed_tools: tuple[str, ...] = ()
