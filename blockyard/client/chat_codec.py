"""Turns messages and tools into those of the public API. Does no I/O.

Reads values in OpenAI's form too. Refuses only what a message of the API cannot hold: the gateway checks the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from blockyard.client.chat import Message, Role, Tool, ToolChoice
from blockyard.client.results import ToolCall
from blockyard.errors import Violation
from blockyard.inference.v1 import inference_pb2

if TYPE_CHECKING:
    from blockyard.client.chat import Messages

_WRONG = (TypeError, ValueError, AttributeError, KeyError)
_MESSAGE_NAMES = frozenset(Message.__slots__)


@dataclass(slots=True)
class Encoded:
    """A conversation, and the violations of what did not fit into it."""

    conversation: inference_pb2.Conversation = field(default_factory=inference_pb2.Conversation)
    violations: list[Violation] = field(default_factory=list[Violation])

    def put(self, name: str, value: Any, put: Callable[[inference_pb2.Conversation, Any], None]) -> None:
        """Puts a value into a field, or notes why it cannot be there."""
        try:
            put(self.conversation, value)
        except _WRONG as error:
            # Not what was said: an error may be logged.
            problem = f"has no {error}" if isinstance(error, KeyError) else str(error)
            self.violations.append(Violation(f"conversation.{name}", problem))


def encode(messages: Messages, options: Mapping[str, Any]) -> Encoded:
    """Makes a conversation of messages and of the options that concern it. An option that is None counts as absent.

    Raises TypeError for a text in place of messages.
    """
    if isinstance(messages, str):
        raise TypeError('messages is a list: use [Message("user", text)]')
    encoded = Encoded()
    encoded.conversation.parse_answer = True
    for number, message in enumerate(messages):
        encoded.put(f"messages[{number}]", message, _put_message)
    for number, tool in enumerate(options.get("tools") or ()):
        encoded.put(f"tools[{number}]", tool, _put_tool)
    for name, put in _PUT.items():
        if options.get(name) is not None:
            encoded.put(name, options[name], put)
    return encoded


def _put_message(conversation: inference_pb2.Conversation, given: Message | Mapping[str, Any]) -> None:
    message = _read_message(given) if isinstance(given, Mapping) else given
    encoded = inference_pb2.Message(
        role=inference_pb2.Role.Value(f"ROLE_{Role(message.role).name}"),
        content=[inference_pb2.ContentPart(text=text) for text in _texts_of(message.content)],
        name=message.name,
        tool_calls=[
            inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )
    conversation.messages.append(encoded)


def _texts_of(content: Any) -> list[str]:
    if content is None:
        return []
    return [content] if isinstance(content, str) else list(content)


def _read_message(given: Mapping[str, Any]) -> Message:
    """Reads OpenAI's form of a message."""
    fields = {name: value for name, value in given.items() if value is not None}
    if unknown := fields.keys() - _MESSAGE_NAMES:
        raise ValueError(f"a message has no {', '.join(sorted(unknown))}")
    if isinstance(parts := fields.get("content"), list):
        fields["content"] = [_read_part(part) for part in cast("list[Any]", parts)]
    fields["tool_calls"] = [_read_call(call) for call in fields.get("tool_calls", ())]
    return Message(fields.pop("role"), **fields)


def _read_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if part["type"] != "text":
        raise ValueError(f"a part of the type {part['type']!r} is not supported, only text is")
    return part["text"]


def _read_call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call["function"]
    return ToolCall(function["name"], function["arguments"], call.get("id", ""))


def _put_tool(conversation: inference_pb2.Conversation, given: Tool | Mapping[str, Any]) -> None:
    if isinstance(given, Mapping):
        function = given["function"]
        given = Tool(
            function["name"],
            function.get("description") or "",
            function.get("parameters"),
            strict=bool(function.get("strict")),
        )
    parameters = "" if given.parameters is None else json.dumps(given.parameters, ensure_ascii=False)
    conversation.tools.add(name=given.name, description=given.description, parameters=parameters, strict=given.strict)


def _put_tool_choice(conversation: inference_pb2.Conversation, choice: str) -> None:
    conversation.tool_choice = inference_pb2.ToolChoice.Value(f"TOOL_CHOICE_{ToolChoice(choice).name}")


def _put_add_generation_prompt(conversation: inference_pb2.Conversation, adds: bool) -> None:
    conversation.add_generation_prompt = adds


def _put_continue_final_message(conversation: inference_pb2.Conversation, continues: bool) -> None:
    conversation.continue_final_message = continues


def _put_named_tool(conversation: inference_pb2.Conversation, name: str) -> None:
    conversation.named_tool = name
    conversation.tool_choice = inference_pb2.TOOL_CHOICE_REQUIRED


def _put_parse_answer(conversation: inference_pb2.Conversation, parses: bool) -> None:
    conversation.parse_answer = parses


def _put_one_tool_call(conversation: inference_pb2.Conversation, one: bool) -> None:
    conversation.one_tool_call = one


def _put_template_arguments(conversation: inference_pb2.Conversation, arguments: Mapping[str, Any]) -> None:
    conversation.template_arguments.update(dict(arguments))


_PUT: dict[str, Callable[[inference_pb2.Conversation, Any], None]] = {
    "named_tool": _put_named_tool,
    "tool_choice": _put_tool_choice,
    "add_generation_prompt": _put_add_generation_prompt,
    "continue_final_message": _put_continue_final_message,
    "template_arguments": _put_template_arguments,
    "parse_answer": _put_parse_answer,
    "one_tool_call": _put_one_tool_call,
}
