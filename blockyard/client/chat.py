"""Options of a chat. Imports neither protobuf messages nor connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockyard.client.results import GenerationOptions
from blockyard.contract.chat import Message, Tool, ToolChoice

Messages = Sequence[Message | Mapping[str, Any]]
"""A conversation. A mapping is a message in OpenAI's form: `{"role": "user", "content": "Hi"}`."""


class ChatOptions(GenerationOptions, total=False):
    """Options of a chat: those of GenerationOptions, and the following."""

    tools: Sequence[Tool | Mapping[str, Any]]
    """Tools that the model may call; a mapping is a tool in OpenAI's form. [none]"""
    tool_choice: ToolChoice | str
    """auto, none or required. [auto; required with a named_tool]"""
    named_tool: str
    """The tool that the model calls. [none]"""
    add_generation_prompt: bool
    """End the prompt with the beginning of an assistant message. [True, unless a message is continued]"""
    continue_final_message: bool
    """Continue the last message instead of beginning a new one. [False]"""
    template_arguments: Mapping[str, Any]
    """Variables of the model's chat template, such as `enable_thinking`. [none]"""
    parse_answer: bool
    """Split reasoning and tool calls from the answer's text, by the model's dialect. [True]"""
    one_tool_call: bool
    """Allow at most one tool call; the text after the call is left out. [False]"""
