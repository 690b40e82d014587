"""What a case asks for, said to each front: once in the proto's paths, here as a spec and as a body of the OpenAI API.

Names come from the table that the gateway itself renames its errors by. A few values have another form over HTTP, and
only these are told here.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import Violation, invalid
from blockyard.inference.v1 import inference_pb2
from gateway.fronts.openai.call_spec import understand_chat
from gateway.fronts.openai.errors import rename
from gateway.fronts.openai.schema.requests import ChatBody

if TYPE_CHECKING:
    from collections.abc import Mapping

# By path in GenerationSpec: {"sampling.top_p": 0.5}. A "prompt" is text or ids; messages and tools are dictionaries.
Ask = dict[str, Any]
UNKNOWN_NUMBER = 99
_ENUMS = {
    "tool_choice": inference_pb2.ToolChoice,
    "on_disconnect": inference_pb2.OnDisconnect,
    "on_update": inference_pb2.OnUpdate,
    "early_stopping": sampling_pb2.EarlyStopping,
}


def spec_of(asked: Ask) -> inference_pb2.GenerationSpec:
    """Says it over gRPC; raises ValueError or TypeError where a field of the proto cannot hold a value."""
    spec = inference_pb2.GenerationSpec()
    for path, value in asked.items():
        _PUT.get(path, _put)(spec, path, value)
    return spec


def _put(spec: Any, path: str, value: Any) -> None:
    *sections, name = path.split(".")
    message = spec
    for section in sections:
        message = getattr(message, section)
        message.SetInParent()
    if isinstance(value, dict):
        getattr(message, name).update(value)
    elif isinstance(value, list | tuple):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def _put_prompt(spec: Any, _path: str, value: str | list[int]) -> None:
    if isinstance(value, str):
        spec.text = value
    else:
        spec.token_ids.ids.extend(value)
        spec.token_ids.SetInParent()


def _put_enum(spec: Any, path: str, value: str) -> None:
    field = path.rpartition(".")[2]
    _put(spec, path, number_of(_ENUMS[field], field, value))


def number_of(enum: Any, prefix: str, name: str) -> int:
    """The number of a value; of one that there is not, one that a later version may have."""
    return dict(enum.items()).get(f"{prefix}_{name}".upper(), UNKNOWN_NUMBER)


def _put_seconds(spec: Any, path: str, value: float) -> None:
    getattr(spec, path).FromNanoseconds(round(value * 1e9))


def _put_messages(spec: Any, _path: str, messages: list[dict[str, Any]]) -> None:
    spec.conversation.SetInParent()
    for told in messages:
        message = spec.conversation.messages.add(
            name=told.get("name"),
            tool_call_id=told.get("tool_call_id"),
            reasoning_content=told.get("reasoning_content"),
            tool_calls=[inference_pb2.ToolCall(**call) for call in told.get("tool_calls", ())],
        )
        message.role = number_of(inference_pb2.Role, "role", told.get("role", "unspecified"))
        for part in _parts_of(told):
            # One of another kind is one that this version of the proto has no name for.
            message.content.add(text=part) if isinstance(part, str) else message.content.add()


def _parts_of(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return [] if content is None else [content] if isinstance(content, str) else content


def _put_tools(spec: Any, _path: str, tools: list[dict[str, Any]]) -> None:
    for tool in tools:
        schema = tool.get("parameters")
        parameters = schema if isinstance(schema, str) or schema is None else json.dumps(schema)
        spec.conversation.tools.add(
            name=tool["name"],
            description=tool.get("description"),
            parameters=parameters,
            strict=tool.get("strict"),
        )


def _put_sequences(spec: Any, path: str, sequences: list[list[int]]) -> None:
    field = functools.reduce(getattr, path.split("."), spec)
    for sequence in sequences:
        field.add(token_ids=sequence)


_PUT = {
    "prompt": _put_prompt,
    "conversation.messages": _put_messages,
    "conversation.tools": _put_tools,
    "conversation.tool_choice": _put_enum,
    "on_disconnect": _put_enum,
    "on_update": _put_enum,
    "beam_search.early_stopping": _put_enum,
    "max_queue_time": _put_seconds,
    "sampling.bad_token_sequences": _put_sequences,
    "sampling.thinking_tokens.begins": _put_sequences,
}


def names_of_chat() -> Mapping[str, str]:
    """What a chat of the OpenAI API calls the core's fields, as the gateway has it."""
    body = ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    return understand_chat(body).names


NAMES: dict[str, Mapping[str, str]] = {"text": {}, "chat": names_of_chat()}


# vLLM's parameters for the forms of answers; each of them alone.
_STRUCTURED = {
    "format.json_schema.schema": "json",
    "format.json_schema.compact": "disable_any_whitespace",
    "format.json_object": "json_object",
    "format.regex": "regex",
    "format.choices.texts": "choice",
    "format.grammar": "grammar",
    "format": "json_object",
}


def parameter_of(path: str, family: str) -> str:
    """The parameter of the OpenAI API that a path of the proto is."""
    for known, name in _STRUCTURED.items():
        if path.startswith(known):
            return f"structured_outputs.{name}{path[len(known) :]}"
    return rename(invalid([Violation(path, "")]), NAMES[family]).violations[0].field


def body_of(asked: Ask, family: str) -> dict[str, Any]:
    """Says it over HTTP."""
    body: dict[str, Any] = {}
    for path, value in asked.items():
        if path == "conversation.parse_answer":
            # Over HTTP an answer always is.
            continue
        parameter, value = parameter_of(path, family), _VALUES.get(path, lambda value: value)(value)
        if path in _STRUCTURED:
            section, _, parameter = parameter.partition(".")
            body.setdefault(section, {})[parameter] = value
        else:
            body[parameter] = value
        if path.startswith("beam_search."):
            body["use_beam_search"] = True
        if path == "sampling.logprobs" and family == "chat":
            body["logprobs"] = True
    return body


def _message_body(told: dict[str, Any]) -> dict[str, Any]:
    message = dict(told)
    if isinstance(parts := told.get("content"), list):
        message["content"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url"} for part in parts
        ]
    if calls := told.get("tool_calls"):
        message["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return message


_VALUES = {
    "conversation.one_tool_call": lambda one: not one,
    "conversation.named_tool": lambda name: {"type": "function", "function": {"name": name}},
    "conversation.allowed_tools": lambda names: {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": name}} for name in names],
        },
    },
    "conversation.messages": lambda messages: [_message_body(message) for message in messages],
    "conversation.tools": lambda tools: [{"type": "function", "function": tool} for tool in tools],
    "beam_search.early_stopping": lambda value: {"heuristic": False, "first": True}.get(value, value),
}
