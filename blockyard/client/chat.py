"""Options of a chat. Knows neither the API's messages nor connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockyard.client.results import GenerationOptions
from blockyard.contract.chat import Message, Tool, ToolChoice

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
