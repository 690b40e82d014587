"""Builds a conversation from a client's messages and options, which may be in OpenAI's form. Does no I/O.

Refuses only values that the API's protobuf messages cannot hold: the gateway checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from blockyard.client.chat import ChatOptions, Messages
from blockyard.contract.chat import Conversation, Message, Tool, ToolCall, ToolChoice
from blockyard.contract.codec.chat import encode_conversation
from blockyard.errors import Violation

WRONG = (TypeError, ValueError, AttributeError, KeyError, OverflowError)
"""Errors that a value raises if a protobuf message cannot hold it."""
_MESSAGE_NAMES = frozenset(Message.__slots__)
# Their order is the order in which violations are listed.
_OPTIONS = tuple(name for name in Conversation.__slots__ if name in ChatOptions.__optional_keys__ - {"tools"})


def problem_of(make: Callable[..., object], *args: Any) -> str:
    """Returns why `make(*args)` fails; empty if it succeeds. The text does not repeat the value."""
    try:
        make(*args)
    except WRONG as error:
        return f"has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
    return ""


def read_conversation(messages: Messages, options: Mapping[str, Any]) -> Conversation:
    """Builds a conversation from messages and the options that concern it; raises one of WRONG."""
    named = ToolChoice.REQUIRED if "named_tool" in options else ToolChoice.AUTO
    given: dict[str, Any] = {"parse_answer": True} | {name: options[name] for name in _OPTIONS if name in options}
    given["tool_choice"] = ToolChoice(given.get("tool_choice", named))
    return Conversation(
        tuple(map(_read_message, messages)), tools=tuple(map(_read_tool, options.get("tools", ()))), **given
    )


def find_chat_violations(messages: Messages, options: Mapping[str, Any]) -> Iterator[Violation]:
    """Encodes each message, tool and option by itself; yields a violation for each that cannot be encoded."""
    for number, message in enumerate(messages):
        yield from _check(f"messages[{number}]", [message], {})
    for number, tool in enumerate(options.get("tools", ())):
        yield from _check(f"tools[{number}]", [], {"tools": [tool]})
    for name in _OPTIONS:
        if name in options:
            yield from _check(name, [], {name: options[name]})


def _check(place: str, messages: Sequence[Any], options: Mapping[str, Any]) -> Iterator[Violation]:
    # Leave the value out of the text: an error may be logged.
    if problem := problem_of(lambda: encode_conversation(read_conversation(messages, options))):
        yield Violation(f"conversation.{place}", problem)


def _read_message(given: Message | Mapping[str, Any]) -> Message:
    """Converts a message from OpenAI's form; a `Message` is returned unchanged."""
    if not isinstance(given, Mapping):
        return given
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


def _read_tool(given: Tool | Mapping[str, Any]) -> Tool:
    """Converts a tool from OpenAI's form; a `Tool` is returned unchanged."""
    if not isinstance(given, Mapping):
        return given
    function = given["function"]
    return Tool(
        function["name"],
        function.get("description") or "",
        function.get("parameters"),
        strict=bool(function.get("strict")),
    )
