"""Messages and tools of a chat as plain values. Knows neither the API's messages nor connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from blockyard.client.results import GenerationOptions, ToolCall


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    DEVELOPER = "developer"
    """What newer models call the system; the model's chat template gets it under the old name."""
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class ToolChoice(StrEnum):
    """Whether the model may call tools."""

    AUTO = "auto"
    """As it likes."""
    NONE = "none"
    """The model sees no tool."""
    REQUIRED = "required"
    """It calls one at least."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is a text or several, which become lines of one.

    Args:
        role: a Role, or its name.
        content: None where there is none, beside calls of tools.
        name: who of several, or the tool's name.
        tool_calls: that the assistant makes with it.
        tool_call_id: the call that a tool answers with it.
        reasoning_content: what the assistant thought before it, for templates that show it.
    """

    role: Role | str
    content: str | Sequence[str] | None = None
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `parameters` is a JSON schema, which arguments always follow if `strict`."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


Messages = Sequence[Message | Mapping[str, Any]]
"""A conversation. A mapping is a message in OpenAI's form: `{"role": "user", "content": "Hi"}`."""


class ChatOptions(GenerationOptions, total=False):
    """Options of a chat: all of GenerationOptions, and these."""

    tools: Sequence[Tool | Mapping[str, Any]]
    """Tools that the model may call; a mapping is one in OpenAI's form. [none]"""
    tool_choice: ToolChoice | str
    """auto, none or required. [auto; required with a named_tool]"""
    named_tool: str
    """The tool that the model calls. [none]"""
    add_generation_prompt: bool
    """The prompt ends where the assistant begins to speak. [True, unless a message is continued]"""
    continue_final_message: bool
    """The answer goes on with the last message. [False]"""
    template_arguments: Mapping[str, Any]
    """Variables of the model's chat template, `enable_thinking` for one. [none]"""
    parse_answer: bool
    """Tell what the model thinks, and its calls of tools, apart from its text, by its dialect. [True]"""
    one_tool_call: bool
    """The model calls one tool at most; what it says behind that call is left out. [False]"""
