"""Conversations of the public API as values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.chat import (
    MAX_ARGUMENTS_BYTES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PIECES,
    MAX_TOOLS,
    Conversation,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
)
from blockyard.contract.codec.chat import decode_conversation, encode_conversation
from blockyard.errors import BlockyardError, Reason
from blockyard.inference.v1 import inference_pb2

ContentPart = inference_pb2.ContentPart


def test_every_field_is_read() -> None:
    message = inference_pb2.Message(
        role=inference_pb2.ROLE_ASSISTANT,
        content=[ContentPart(text="a"), ContentPart(text="b")],
        name="n",
        tool_calls=[inference_pb2.ToolCall(id="1", name="f", arguments="{}")],
        tool_call_id="2",
        reasoning_content="hm",
    )
    conversation = inference_pb2.Conversation(
        messages=[message],
        tools=[inference_pb2.Tool(name="f", description="d", parameters="{}", strict=True)],
        tool_choice=inference_pb2.TOOL_CHOICE_NONE,
        add_generation_prompt=False,
        continue_final_message=True,
        template_arguments={"a": 1},
        parse_answer=True,
        named_tool="f",
        one_tool_call=True,
    )
    for filled in (message, conversation):
        assert len(filled.ListFields()) == len(filled.DESCRIPTOR.fields)
    assert decode_conversation(conversation) == Conversation(
        (Message(Role.ASSISTANT, "a\nb", "n", (ToolCall("f", "{}", "1"),), "2", "hm"),),
        (Tool("f", "d", "{}", strict=True),),
        ToolChoice.NONE,
        add_generation_prompt=False,
        continue_final_message=True,
        template_arguments={"a": 1},
        parse_answer=True,
        named_tool="f",
        one_tool_call=True,
    )


def test_what_is_absent_is_none() -> None:
    assert decode_conversation(inference_pb2.Conversation(messages=[inference_pb2.Message()])) == Conversation(
        (Message(""),)
    )


def test_what_is_empty_is_there() -> None:
    told = inference_pb2.Message(
        role=inference_pb2.ROLE_TOOL, content=[ContentPart(text="")], name="", tool_call_id="", reasoning_content=""
    )
    (message,) = decode_conversation(inference_pb2.Conversation(messages=[told])).messages
    assert message == Message(Role.TOOL, "", "", (), "", "")


@pytest.mark.parametrize("role", Role)
def test_every_role_has_a_number(role: Role) -> None:
    told = inference_pb2.Message(role=inference_pb2.Role.Value(f"ROLE_{role.name}"))
    assert decode_conversation(inference_pb2.Conversation(messages=[told])).messages[0].role is role


def test_numbers_of_a_later_version_are_nobodys() -> None:
    told: Any = inference_pb2.Conversation(messages=[inference_pb2.Message()])
    told.messages[0].role = 77
    told.tool_choice = 78
    conversation = decode_conversation(told)
    assert (conversation.messages[0].role, conversation.tool_choice) == ("", None)


def test_parts_that_are_not_text_are_not_left_out_in_silence() -> None:
    told = inference_pb2.Message(role=inference_pb2.ROLE_USER, content=[ContentPart(text="see"), ContentPart()])
    with pytest.raises(BlockyardError) as raised:
        decode_conversation(inference_pb2.Conversation(messages=[inference_pb2.Message(), told]))
    assert raised.value.reason is Reason.UNSUPPORTED_PARAMETER
    assert raised.value.violations[0].field == "conversation.messages[1].content"


def test_what_is_too_long_is_not_read_to_its_end() -> None:
    told = inference_pb2.Conversation(
        messages=[inference_pb2.Message()] * (MAX_MESSAGES + 9), tools=[inference_pb2.Tool()] * (MAX_TOOLS + 9)
    )
    told.messages[0].tool_calls.extend([inference_pb2.ToolCall()] * (MAX_TOOLS + 9))
    conversation = decode_conversation(told)
    assert (len(conversation.messages), len(conversation.tools)) == (MAX_MESSAGES + 1, MAX_TOOLS + 1)
    assert len(conversation.messages[0].tool_calls) == MAX_TOOLS + 1


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({"messages": [{}, {"content": [{"text": "x"}] * (MAX_PARTS + 1)}]}, "conversation.messages[1].content"),
        ({"messages": [{"tool_calls": [{}] * 1000}] * (MAX_PIECES // 1000 + 1)}, "conversation.messages"),
        ({"template_arguments": {"a": "x" * MAX_ARGUMENTS_BYTES}}, "conversation.template_arguments"),
    ],
)
def test_what_is_too_long_is_refused(told: dict[str, Any], field: str) -> None:
    with pytest.raises(BlockyardError) as raised:
        decode_conversation(inference_pb2.Conversation(**told))
    assert raised.value.reason is Reason.FIELD_INVALID
    assert raised.value.violations[0].field == field


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), _VALUES, max_size=4))
def test_variables_of_a_template_survive(arguments: dict[str, Any]) -> None:
    told = inference_pb2.Conversation()
    told.template_arguments.update(arguments)
    read = inference_pb2.Conversation.FromString(told.SerializeToString())
    assert decode_conversation(read).template_arguments == arguments


@given(st.permutations(["a", "b", "c"]))
def test_variables_are_in_the_order_of_their_names(names: list[str]) -> None:
    told = inference_pb2.Conversation()
    told.template_arguments.update({"deep": dict.fromkeys(names, 1)})
    assert list(decode_conversation(told).template_arguments["deep"]) == ["a", "b", "c"]


def test_a_number_without_a_fraction_is_an_integer() -> None:
    told = inference_pb2.Conversation(template_arguments={"i": 3.0, "f": 0.5, "inf": float("inf"), "large": 1e300})
    arguments = decode_conversation(told).template_arguments
    assert {name: type(value) for name, value in arguments.items()} == {
        "i": int,
        "f": float,
        "inf": float,
        "large": float,
    }


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation(()),
        Conversation(
            (Message(Role.ASSISTANT, "a\nb", "n", (ToolCall("f", "{}", "1"),), "2", "hm"), Message(Role.USER, "")),
            (Tool("f", "d", '{"type": "object"}', strict=True), Tool("g", parameters="")),
            ToolChoice.NONE,
            add_generation_prompt=False,
            continue_final_message=True,
            template_arguments={"a": [1, {"b": None}]},
            parse_answer=True,
            named_tool="f",
            one_tool_call=True,
        ),
    ],
)
def test_a_conversation_survives(conversation: Conversation) -> None:
    assert decode_conversation(encode_conversation(conversation)) == conversation


def test_a_content_of_several_parts_becomes_lines_of_one() -> None:
    told = Conversation((Message("user", ["a", "b"]),))
    (message,) = decode_conversation(encode_conversation(told)).messages
    assert (message.content, message.text, told.messages[0].text) == ("a\nb", "a\nb", "a\nb")
    assert Message("user").text is None


def test_a_schema_may_be_given_as_a_value() -> None:
    told = Tool("f", parameters={"type": "object", "title": "ü"})
    (tool,) = decode_conversation(encode_conversation(Conversation((), (told,)))).tools
    assert tool.schema == told.schema == '{"type": "object", "title": "ü"}'
    assert Tool("f").schema == ""
