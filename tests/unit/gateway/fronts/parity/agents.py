"""The same conversation, and its answer, as the three APIs of agents write it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from blockyard.errors import Reason

# Of a model that thinks, and calls tools.
TEMPLATE = Path(__file__).with_name("hermes.jinja")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
PATH = {"path": "/src/a.py"}


class Told(NamedTuple):
    """What an answer says, and what it cost: tokens of the prompt, those of them in the cache, tokens of the answer."""

    reasoning: str
    text: str
    calls: tuple[tuple[str, Any], ...]
    ending: str
    usage: tuple[int, int, int]


class Api(NamedTuple):
    """One of the APIs: its path, the body that says the same there, and what it calls each ending."""

    path: str
    body: dict[str, Any]
    endings: dict[str, str]


_FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
_SAMPLING = {"temperature": 0.5, "top_p": 0.75}
_ARGUMENTS = json.dumps(PATH)

CHAT = Api(
    "/v1/chat/completions",
    {
        **_SAMPLING,
        "model": "demo",
        "max_completion_tokens": 64,
        "tools": [{"type": "function", "function": _FUNCTION}],
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Fix it."},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "A file.",
                "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": _ARGUMENTS}}
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "empty"},
            {"role": "user", "content": "Go on."},
        ],
    },
    {"stop": "stop", "length": "length", "calls": "tool_calls"},
)
MESSAGES = Api(
    "/v1/messages",
    {
        **_SAMPLING,
        "model": "demo",
        "max_tokens": 64,
        "system": "Be brief.",
        "tools": [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "output_config": {"effort": "low"},
        "messages": [
            {"role": "user", "content": "Fix it."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "A file.", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "call_1", "name": "read", "input": PATH},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "empty"},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
    },
    {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use"},
)
RESPONSES = Api(
    "/v1/responses",
    {
        **_SAMPLING,
        "model": "demo",
        "max_output_tokens": 64,
        "instructions": "Be brief.",
        "tools": [{"type": "function", **_FUNCTION, "strict": False}],
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "input": [
            {"role": "user", "content": "Fix it."},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A file."}]},
            {"role": "assistant", "content": "I look."},
            {"type": "function_call", "call_id": "call_1", "name": "read", "arguments": _ARGUMENTS},
            {"type": "function_call_output", "call_id": "call_1", "output": "empty"},
            {"role": "user", "content": "Go on."},
        ],
    },
    {"stop": "completed", "length": "incomplete", "calls": "completed"},
)
APIS = (CHAT, MESSAGES, RESPONSES)

# What a body has in other words than above, for each API in turn; None: that API has no word for it.
Columns = tuple[dict[str, Any] | None, ...]


def _tools(**changes: Any) -> Columns:
    function: dict[str, Any] = {**_FUNCTION, "strict": False, **changes}
    told = {name: function[name] for name in ("name", "description", "strict")}
    return (
        {"tools": [{"type": "function", "function": function}]},
        {"tools": [{**told, "input_schema": function["parameters"]}]},
        {"tools": [{"type": "function", **function}]},
    )


def _form(schema: dict[str, Any]) -> Columns:
    named = {"name": "form", "schema": schema, "strict": True}
    return (
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}},
        {"text": {"format": {"type": "json_schema", **named}}},
    )


FEATURES: dict[str, Columns] = {
    "a temperature": ({"temperature": 0.25},) * 3,
    "a nucleus": ({"top_p": 0.5},) * 3,
    "the likeliest tokens": ({"top_k": 5}, {"top_k": 5}, None),
    "a length": ({"max_completion_tokens": 7}, {"max_tokens": 7}, {"max_output_tokens": 7}),
    "stop strings": ({"stop": ["a", "b"]}, {"stop_sequences": ["a", "b"]}, None),
    "log probabilities": (
        {"logprobs": True, "top_logprobs": 2},
        None,
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ),
    "several calls": ({"parallel_tool_calls": True}, {"tool_choice": {"type": "auto"}}, {"parallel_tool_calls": True}),
    "no calls": (
        {"tool_choice": "none", "parallel_tool_calls": True},
        {"tool_choice": {"type": "none"}},
        {"tool_choice": "none", "parallel_tool_calls": True},
    ),
    "a call in any case": (
        {"tool_choice": "required"},
        {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
        {"tool_choice": "required"},
    ),
    "a call of one tool": (
        {"tool_choice": {"type": "function", "function": {"name": "read"}}},
        {"tool_choice": {"type": "tool", "name": "read", "disable_parallel_tool_use": True}},
        {"tool_choice": {"type": "function", "name": "read"}},
    ),
    "a call of some tools": (
        {
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "read"}}]},
            }
        },
        None,
        {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "read"}]}},
    ),
    "a strict tool": _tools(strict=True),
    "a schema": _form(SCHEMA),
    "an object": ({"response_format": {"type": "json_object"}}, None, {"text": {"format": {"type": "json_object"}}}),
    "much effort": (
        {"reasoning_effort": "high"},
        {"output_config": {"effort": "high"}},
        {"reasoning": {"effort": "high"}},
    ),
    "a budget of thoughts": (
        {"thinking_token_budget": 9, "chat_template_kwargs": {"enable_thinking": True}},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
        None,
    ),
    "no thoughts": (
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}, "output_config": {}},
        {"reasoning": {"effort": "none"}},
    ),
}


class Rule(NamedTuple):
    """What each API refuses: with which reason, and at which place of its own body."""

    bodies: Columns
    places: tuple[str, ...]
    reason: Reason = Reason.FIELD_INVALID


_LONG = "word " * 2000
_NO_TYPE = {"type": "object", "properties": {"a": {"type": "nonsense"}}}
RULES: dict[str, Rule] = {
    "another model": Rule(({"model": "other"},) * 3, ("model",) * 3, Reason.MODEL_NOT_FOUND),
    "an empty nucleus": Rule(({"top_p": 0},) * 3, ("top_p",) * 3),
    "a number in words": Rule(({"temperature": "warm"},) * 3, ("temperature",) * 3),
    "what nobody knows": Rule(({"mood": "good"},) * 3, ("mood",) * 3),
    "no length": Rule(
        ({"max_completion_tokens": 0}, {"max_tokens": 0}, {"max_output_tokens": 0}),
        ("max_completion_tokens", "max_tokens", "max_output_tokens"),
    ),
    "a long prompt": Rule(
        (
            {"messages": [{"role": "user", "content": _LONG}]},
            {"messages": [{"role": "user", "content": _LONG}]},
            {"input": _LONG},
        ),
        ("messages", "messages", "input"),
        Reason.PROMPT_TOO_LONG,
    ),
    "a foreign role": Rule(
        (
            {"messages": [{"role": "x"}]},
            {"messages": [{"role": "x", "content": ""}]},
            {"input": [{"role": "x", "content": ""}]},
        ),
        ("messages[0].role", "messages[0].role", "input[0].role"),
    ),
    "a picture": Rule(
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x:"}}]}]},
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        ),
        ("messages[0].content", "messages[0].content", "input[0].content"),
        Reason.UNSUPPORTED_PARAMETER,
    ),
    "a call of a tool that is not there": Rule(
        (
            {"tool_choice": {"type": "function", "function": {"name": "write"}}},
            {"tool_choice": {"type": "tool", "name": "write"}},
            {"tool_choice": {"type": "function", "name": "write"}},
        ),
        ("tool_choice",) * 3,
    ),
    "a schema of a tool that is none": Rule(
        _tools(strict=True, parameters=_NO_TYPE),
        (
            "tools[0].function.parameters.properties.a.type",
            "tools[0].input_schema.properties.a.type",
            "tools[0].parameters.properties.a.type",
        ),
    ),
    "a schema that is none": Rule(
        _form(_NO_TYPE),
        (
            "response_format.json_schema.schema.properties.a.type",
            "output_config.format.schema.properties.a.type",
            "text.format.schema.properties.a.type",
        ),
    ),
}


def told_by(api: Api, body: dict[str, Any]) -> Told:
    """Reads a whole answer."""
    return {CHAT.path: _of_chat, MESSAGES.path: _of_message, RESPONSES.path: _of_response}[api.path](body)


def _of_chat(body: dict[str, Any]) -> Told:
    (choice,), usage = body["choices"], body["usage"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return Told(
        message.get("reasoning_content", ""),
        message["content"] or "",
        tuple((call["name"], json.loads(call["arguments"])) for call in calls),
        choice["finish_reason"],
        (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]),
    )


def _of_message(body: dict[str, Any]) -> Told:
    blocks, usage = body["content"], body["usage"]
    num_cached = usage["cache_read_input_tokens"]
    return Told(
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        tuple((block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"),
        body["stop_reason"],
        (usage["input_tokens"] + num_cached, num_cached, usage["output_tokens"]),
    )


def _of_response(body: dict[str, Any]) -> Told:
    items, usage = body["output"], body["usage"]

    def text_of(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

    return Told(
        text_of("reasoning"),
        text_of("message"),
        tuple((item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"),
        body["status"],
        (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]),
    )


def whole_of_stream(api: Api, text: str) -> dict[str, Any]:
    """Returns the whole answer that a stream of messages or responses ends with."""
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    return events[-1]["response"] if api is RESPONSES else _message_of(events)


def _message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                inputs[event["index"]] = inputs.get(event["index"], "") + event["delta"]["partial_json"]
            case "content_block_delta":
                kind = event["delta"]["type"].removesuffix("_delta")
                message["content"][event["index"]][kind] += event["delta"][kind]
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
            case _:
                pass
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message
