"""Builds the public API's requests from a client's options, and conversations from messages, also in OpenAI's form.

Does no I/O, so both clients share it. Refuses only values that the API's protobuf messages cannot hold: the gateway
checks the rest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

from blockyard.client.chat import ChatOptions, Messages
from blockyard.client.results import GenerationOptions, StructuredOutputsParams
from blockyard.contract.chat import Conversation, Message, Tool, ToolCall, ToolChoice
from blockyard.contract.codec.chat import encode_conversation
from blockyard.contract.codec.request import encode_spec
from blockyard.contract.request import (
    Choices,
    GenerationSpec,
    JsonObject,
    JsonSchema,
    Lark,
    OnDisconnect,
    OnUpdate,
    Regex,
)
from blockyard.contract.sampling import SamplingParams, StopCriteria
from blockyard.errors import Violation, invalid

if TYPE_CHECKING:
    from enum import StrEnum

    from blockyard.contract.request import OutputFormat
    from blockyard.inference.v1 import inference_pb2


Member = TypeVar("Member", bound="StrEnum")

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


# These options have the names of the fields; the excluded ones are converted separately.
_SPEC = frozenset(field.name for field in fields(GenerationSpec)) - {"stop", "on_disconnect", "on_update"}

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))

_STOP = frozenset(field.name for field in fields(StopCriteria))


def make_spec(prompt: str | Sequence[int], options: GenerationOptions) -> inference_pb2.GenerationSpec:
    """Builds a request. An option that is None counts as absent.

    Raises TypeError for an unknown option, and BlockyardError (FIELD_INVALID) with a violation for every value that its
    field cannot hold. The gateway makes all other checks.
    """
    given = _given(options, GenerationOptions.__optional_keys__)
    prompt = prompt if isinstance(prompt, str) else tuple(prompt)
    try:
        return _encode(prompt, given)
    except WRONG:
        violations = list(_find_violations(given))
    if problem := problem_of(_encode, prompt, {}):
        violations.append(Violation("token_ids.ids", f"{prompt!r:.100}: {problem}"))
    raise invalid(violations)


def make_chat_spec(messages: Messages, options: ChatOptions) -> inference_pb2.GenerationSpec:
    """Builds a request whose prompt is a conversation; raises the errors of `make_spec`."""
    if isinstance(messages, str):
        raise TypeError('messages must be a list: use [Message("user", text)]')
    given, messages = _given(options, ChatOptions.__optional_keys__), list(messages)
    try:
        spec = _encode(read_conversation(messages, given), given)
    except WRONG:
        raise invalid([*_find_violations(given), *find_chat_violations(messages, given)]) from None
    if given.get("add_special_tokens"):
        # Send it though it is the default: the gateway refuses it beside a conversation.
        spec.add_special_tokens = True
    return spec


def _given(options: GenerationOptions, known: frozenset[str]) -> dict[str, Any]:
    given = {name: value for name, value in cast("dict[str, Any]", options).items() if value is not None}
    if unknown := sorted(set(given) - known):
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    return given


def _find_violations(given: Mapping[str, Any]) -> Iterator[Violation]:
    """Encodes each option by itself; yields a violation for each that cannot be encoded."""
    for name, value in given.items():
        if problem := problem_of(_encode, "", {name: value}):
            yield Violation(_place_of(name), f"{value!r:.100}: {problem}")


def _place_of(name: str) -> str:
    if name == "stop":
        return "stop.stop_strings"
    return f"sampling.{name}" if name in _SAMPLING else f"stop.{name}" if name in _STOP else name


def _encode(prompt: str | tuple[int, ...] | Conversation, given: Mapping[str, Any]) -> inference_pb2.GenerationSpec:
    """Encodes a request; raises one of WRONG for a value that its field cannot hold."""
    if isinstance(given.get("bad_words"), str):
        # A string is a sequence too: each character would become a word.
        raise TypeError("bad_words must be a list of texts")
    stop = given.get("stop", ())
    spec = GenerationSpec(
        prompt,
        sampling=SamplingParams(**_pick(_SAMPLING, given)),
        stop=StopCriteria(stop_strings=(stop,) if isinstance(stop, str) else stop, **_pick(_STOP, given)),
        on_disconnect=_read_member(OnDisconnect, given.get("on_disconnect", OnDisconnect.KEEP)),
        on_update=_read_member(OnUpdate, given.get("on_update", OnUpdate.CONTINUE)),
        max_queue_seconds=given.get("max_queue_time"),
        format=_read_format(given["structured_outputs"]) if "structured_outputs" in given else None,
        **_pick(_SPEC, given),
    )
    return encode_spec(spec)


def _pick(names: frozenset[str], given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def _read_member(kind: type[Member], name: str) -> Member:
    try:
        return kind(name)
    except ValueError:
        raise ValueError(f"must be one of {', '.join(kind)}") from None


def _read_format(params: StructuredOutputsParams) -> OutputFormat:
    given = [params.json is not None, params.regex is not None, params.choice is not None, params.grammar is not None]
    if sum(given) + params.json_object != 1:
        raise ValueError("must be one of json, regex, choice, grammar and json_object")
    if isinstance(params.choice, str):
        # A string is a sequence too: each character would become a choice.
        raise TypeError("choice must be a list of texts")
    if params.json is not None:
        schema = params.json if isinstance(params.json, str) else json.dumps(params.json, ensure_ascii=False)
        return JsonSchema(schema, params.disable_any_whitespace)
    if params.regex is not None:
        return Regex(params.regex)
    if params.choice is not None:
        return Choices(tuple(params.choice))
    if params.grammar is not None:
        return Lark(params.grammar)
    return JsonSchema('{"type": "object"}', compact=True) if params.disable_any_whitespace else JsonObject()
