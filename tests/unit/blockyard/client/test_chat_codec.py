"""Messages and tools, as values and in OpenAI's form, to those of the API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockyard.client.chat import ChatOptions
from blockyard.client.codec import make_chat_spec, make_spec
from blockyard.client.results import GenerationOptions
from blockyard.contract.chat import Message, Role, Tool, ToolCall, ToolChoice
from blockyard.errors import BlockyardError, Violation
from blockyard.inference.v1 import inference_pb2

HI = Message("user", "hi")
SCHEMA = {"type": "object", "properties": {"wörd": {"type": "string"}}}


def conversation(*messages: Any, **options: Any) -> inference_pb2.Conversation:
    return make_chat_spec(messages or [HI], ChatOptions(**options)).conversation


def violations(*messages: Any, **options: Any) -> list[Violation]:
    with pytest.raises(BlockyardError) as raised:
        conversation(*messages, **options)
    return list(raised.value.violations)


def test_every_field_of_a_message_reaches_the_api() -> None:
    call = ToolCall("look_up", '{"word": "x"}', "c1")
    told = conversation(Message(Role.ASSISTANT, ["a", "b"], "n", [call], "c0", "hm")).messages[0]
    assert len(told.ListFields()) == len(told.DESCRIPTOR.fields)
    assert (told.role, [part.text for part in told.content]) == (inference_pb2.ROLE_ASSISTANT, ["a", "b"])
    assert (told.name, told.tool_call_id, told.reasoning_content) == ("n", "c0", "hm")
    (made,) = told.tool_calls
    assert (made.id, made.name, made.arguments) == ("c1", "look_up", '{"word": "x"}')


def test_what_is_not_there_is_absent() -> None:
    told = conversation(Message(Role.ASSISTANT)).messages[0]
    assert [field.name for field, _ in told.ListFields()] == ["role"]
    assert conversation(Message("user", "")).messages[0].content[0].text == ""


@pytest.mark.parametrize("role", Role)
def test_every_role_by_its_value_and_its_name(role: Role) -> None:
    number = inference_pb2.Role.Value(f"ROLE_{role.name}")
    assert [message.role for message in conversation(Message(role), Message(str(role))).messages] == [number] * 2


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"role": "user", "content": "hi"}, HI),
        ({"role": "user", "content": "hi", "name": None, "tool_calls": None}, HI),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            Message("user", ["a", "b"]),
        ),
        ({"role": "user", "content": ["a", "b"]}, Message("user", ["a", "b"])),
        ({"role": "assistant", "content": None}, Message("assistant")),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            Message("assistant", tool_calls=[ToolCall("f", "{}", "1")]),
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
            Message("assistant", tool_calls=[ToolCall("f")]),
        ),
        (
            {"role": "assistant", "tool_calls": [ToolCall("f")]},
            Message("assistant", tool_calls=[ToolCall("f")]),
        ),
        (
            {"role": "tool", "content": "5", "tool_call_id": "1", "name": "f"},
            Message("tool", "5", "f", tool_call_id="1"),
        ),
        (
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
            Message("assistant", "x", reasoning_content="hm"),
        ),
    ],
)
def test_openais_form_of_a_message(given: dict[str, Any], value: Message) -> None:
    assert conversation(given) == conversation(value)


def test_openais_form_of_a_tool() -> None:
    form = {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA}}
    bare = {"type": "function", "function": {"name": "g", "description": None}}
    told = conversation(tools=[form, bare])
    assert told == conversation(tools=[Tool("f", "does", SCHEMA), Tool("g")])
    assert json.loads(told.tools[0].parameters) == SCHEMA
    assert "wörd" in told.tools[0].parameters
    assert told.tools[1].parameters == ""


def test_every_option_about_a_conversation_reaches_it() -> None:
    told = conversation(
        tools=[Tool("f")],
        tool_choice="none",
        add_generation_prompt=False,
        continue_final_message=True,
        template_arguments={"a": [1, None, {"b": True}]},
        named_tool="f",
        one_tool_call=True,
    )
    assert len(told.ListFields()) == len(told.DESCRIPTOR.fields)
    assert told.tool_choice == inference_pb2.TOOL_CHOICE_NONE
    assert told.HasField("add_generation_prompt") and not told.add_generation_prompt
    assert told.template_arguments["a"][2]["b"] is True
    assert conversation(tool_choice=ToolChoice.AUTO).tool_choice == inference_pb2.TOOL_CHOICE_AUTO


def test_an_option_that_is_none_is_absent() -> None:
    options: Any = dict.fromkeys(ChatOptions.__annotations__)
    assert make_chat_spec([HI], options) == make_chat_spec([HI], {})
    assert not conversation(add_generation_prompt=None).HasField("add_generation_prompt")


def test_all_other_options_are_those_of_a_generation() -> None:
    options = GenerationOptions(n=2, stop="x", seed=3, on_disconnect="abort", logprobs=1, request_id="r")
    chat, text = make_chat_spec([HI], ChatOptions(**options)), make_spec("hi", options)
    chat.ClearField("conversation")
    text.ClearField("text")
    assert chat == text
    assert ChatOptions.__optional_keys__ > GenerationOptions.__optional_keys__


def test_an_empty_conversation_is_the_gateways_to_refuse() -> None:
    assert make_chat_spec([], {}).WhichOneof("prompt") == "conversation"


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (Message("pilot", "x"), "'pilot' is not a valid Role"),
        ({"content": "x"}, "has no 'role'"),
        ({"role": "user", "mood": "good", "age": 3}, "a message has no age, mood"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "a part of the type 'image_url' is not supported"),
        ({"role": "user", "content": [{"type": "text"}]}, "has no 'text'"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "has no 'function'"),
        ({"role": "user", "content": 7}, "not iterable"),
        (Message("user", [7]), ""),  # type: ignore[list-item]
        ("hi", "no attribute"),
    ],
)
def test_a_message_that_is_none_is_told_by_its_place(message: Any, told: str) -> None:
    (violation,) = violations(HI, message)
    assert violation.field == "conversation.messages[1]"
    assert told in violation.description


def test_a_text_is_no_list_of_messages() -> None:
    with pytest.raises(TypeError, match="messages must be a list"):
        make_chat_spec("hi", {})  # type: ignore[arg-type]


def test_errors_do_not_repeat_what_was_said() -> None:
    (violation,) = violations({"role": "user", "content": "a secret", "mood": 1})
    assert "secret" not in violation.description


def test_all_that_is_wrong_is_told_at_once() -> None:
    told = violations(
        Message("pilot"),
        {"role": "user", "mood": 1},
        tools=[{}, Tool("f", parameters={"x": object()})],
        tool_choice="sometimes",
        template_arguments={"x": object()},
        add_generation_prompt="perhaps",
        n="many",
    )
    assert [violation.field for violation in told] == [
        "n",
        "conversation.messages[0]",
        "conversation.messages[1]",
        "conversation.tools[0]",
        "conversation.tools[1]",
        "conversation.tool_choice",
        "conversation.add_generation_prompt",
        "conversation.template_arguments",
    ]


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unknown options: toolz"):
        make_chat_spec([HI], {"toolz": []})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(TypeError, match="unknown options: tools"):
        make_spec("hi", {"tools": []})  # type: ignore[typeddict-unknown-key]
