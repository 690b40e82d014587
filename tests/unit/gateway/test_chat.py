"""Conversations: what is wrong with them, and the prompts that templates make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.contract.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Conversation,
    Message,
    Role,
    Tool,
    ToolCall,
    ToolChoice,
    join_parts,
)
from blockyard.errors import BlockyardError, Reason
from gateway.chat import count_characters, find_violations, prompt_of
from gateway.text.chat_template import ChatTemplate

HI = Message(Role.USER, "hi")
KEPT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<go>{% endif %}"
)
TRIMMED = KEPT.replace("m.content", "m.content | trim")


class Templated:
    """A renderer with one template, which keeps what it was given."""

    def __init__(self, source: str = KEPT) -> None:
        self._template = ChatTemplate(source, {})
        self.given: dict[str, Any] = {}

    def apply_chat_template(self, messages: list[dict[str, Any]], /, **given: Any) -> str:
        self.given = {"messages": messages, **given}
        return self._template.render(**self.given)


def given_of(conversation: Conversation) -> dict[str, Any]:
    """What a template is given."""
    renderer = Templated()
    prompt_of(conversation, renderer)
    return renderer.given


def render(*messages: Message, source: str = KEPT, **fields: Any) -> str:
    return prompt_of(Conversation(messages, **fields), Templated(source))


def fields_of(conversation: Conversation) -> list[str]:
    return [violation.field.removeprefix("conversation.") for violation in find_violations(conversation)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": ()}, ["messages"]),
        ({"messages": (HI,) * (MAX_MESSAGES + 1)}, ["messages"]),
        ({"messages": (HI,) * MAX_MESSAGES}, []),
        ({"messages": (HI, Message(None, "x"))}, ["messages[1].role"]),
        ({"messages": (Message(Role.USER, "", tool_calls=(ToolCall("f"),)),)}, ["messages[0].tool_calls"]),
        ({"messages": (Message(Role.ASSISTANT, None, tool_calls=(ToolCall("f"),)),)}, []),
        (
            {"messages": (Message(Role.ASSISTANT, tool_calls=(ToolCall("f"), ToolCall("", "{}"))),)},
            ["messages[0].tool_calls[1].name"],
        ),
        (
            {"messages": (Message(Role.ASSISTANT, tool_calls=(ToolCall("f"),) * (MAX_TOOLS + 1)),)},
            ["messages[0].tool_calls"],
        ),
        ({"messages": (Message(Role.USER, "", tool_call_id=""),)}, ["messages[0].tool_call_id"]),
        ({"messages": (Message(Role.TOOL, "5", tool_call_id="1"),)}, []),
        ({"tools": (Tool("f"),) * MAX_TOOLS}, []),
        ({"tools": (Tool("f"),) * (MAX_TOOLS + 1)}, ["tools"]),
        ({"tools": (Tool(""), Tool("f", "", "{}"))}, ["tools[0].name"]),
        *(
            ({"tools": (Tool("f", "", schema),)}, ["tools[0].parameters"])
            for schema in ("[]", "7", '"{}"', "{", "null", "[" * 100_000)
        ),
        ({"tool_choice": None}, ["tool_choice"]),
        ({"tools": (Tool("f"), Tool("g")), "allowed_tools": ("g",)}, []),
        ({"tools": (Tool("f"),), "allowed_tools": ("f", "g")}, ["allowed_tools"]),
        ({"template_arguments": {"tools": [], "mood": 1, "messages": []}}, ["template_arguments"]),
        ({"add_generation_prompt": True, "continue_final_message": True}, ["continue_final_message"]),
        ({"add_generation_prompt": False, "continue_final_message": True}, []),
        ({"messages": (HI, Message(Role.ASSISTANT)), "continue_final_message": True}, ["continue_final_message"]),
        ({"messages": (HI, Message(Role.ASSISTANT, "")), "continue_final_message": True}, []),
        ({"messages": (), "continue_final_message": True}, ["messages"]),
    ],
)
def test_what_is_wrong_is_told(fields: dict[str, Any], expected: list[str]) -> None:
    assert fields_of(Conversation(**{"messages": (HI,), **fields})) == expected


def test_all_that_is_wrong_is_told_at_once_and_nothing_rendered() -> None:
    renderer = Templated()
    conversation = Conversation((Message(""), Message(Role.USER, tool_call_id="1")), (Tool(""),), tool_choice=None)
    with pytest.raises(BlockyardError) as raised:
        prompt_of(conversation, renderer)
    assert [violation.field for violation in raised.value.violations] == [
        "conversation.messages[0].role",
        "conversation.messages[1].tool_call_id",
        "conversation.tools[0].name",
        "conversation.tool_choice",
    ]
    assert not renderer.given


def test_a_message_shows_only_what_it_has() -> None:
    told = given_of(
        Conversation(
            (
                Message(Role.DEVELOPER, "be brief"),
                Message(Role.USER, "hi", name="Ann"),
                Message(Role.ASSISTANT, None, reasoning_content="hm"),
                Message(Role.TOOL, "5", tool_call_id="c1", name="f"),
            )
        )
    )
    assert told["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi", "name": "Ann"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "tool", "content": "5", "name": "f", "tool_call_id": "c1"},
    ]
    assert (told["tools"], told["add_generation_prompt"]) == (None, True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ("", {}),
        (" \n", {}),
        ("[1]", "[1]"),
        ("{", "{"),
        ("f(1)", "f(1)"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_arguments_are_an_object_if_they_can_be(arguments: str, expected: Any) -> None:
    message = Message(Role.ASSISTANT, tool_calls=(ToolCall("f", arguments, "c1"),))
    (told,) = given_of(Conversation((message,)))["messages"]
    assert told["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": expected}},
    ]


def test_tools_are_told_as_transformers_tells_them() -> None:
    schema = '{"type": "object", "properties": {"b": {}, "a": {}}}'
    tools = (Tool("f", "Does.", schema), Tool("g"), Tool("h", "", "{}"))
    told = given_of(Conversation((HI,), tools))["tools"]
    assert told == [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": "Does.",
                "parameters": {"type": "object", "properties": {"b": {}, "a": {}}},
            },
        },
        {"type": "function", "function": {"name": "g"}},
        {"type": "function", "function": {"name": "h", "parameters": {}}},
    ]
    # As it was written: templates print it.
    assert list(told[0]["function"]["parameters"]["properties"]) == ["b", "a"]


def test_tools_that_are_not_to_be_called_are_not_told() -> None:
    conversation = Conversation((HI,), (Tool("f"),), ToolChoice.NONE)
    assert given_of(conversation)["tools"] is None
    assert given_of(Conversation((HI,), (Tool("f"),)))["tools"]


@pytest.mark.parametrize("name", ["self", "source", "variables", "renderer", "conversation", "bos_token", "kwargs"])
def test_a_variable_may_have_any_name(name: str) -> None:
    source = f"{{{{ {name} }}}}" if name != "self" else "-"
    assert render(HI, source=source, template_arguments={name: "-"}) == "-"


def test_variables_reach_the_template() -> None:
    assert given_of(Conversation((HI,), template_arguments={"mood": 1, "documents": []}))["mood"] == 1


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "<user>hi</><go>"),
        ({"add_generation_prompt": True}, "<user>hi</><go>"),
        ({"add_generation_prompt": False}, "<user>hi</>"),
        ({"continue_final_message": True}, "<user>hi"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "<user>hi"),
    ],
)
def test_where_a_prompt_ends(fields: dict[str, Any], end: str) -> None:
    assert render(HI, **fields) == end


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (KEPT, "There was ", "There was "),
        (KEPT, "\n a\n", "\n a\n"),
        (KEPT, "", ""),
        (KEPT, "<", "<"),
        (TRIMMED, " There was \n", "There was"),
        (TRIMMED, "a", "a"),
    ],
)
def test_a_message_that_is_continued_ends_the_prompt(source: str, content: str, expected: str) -> None:
    told = render(HI, Message(Role.ASSISTANT, content), source=source, continue_final_message=True)
    assert told == f"<user>hi</><assistant>{expected}"


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_the_last_message_is_continued_wherever_else_its_text_stands(texts: list[str]) -> None:
    messages = tuple(Message(Role.USER, text) for text in texts)
    told = render(*messages, continue_final_message=True)
    assert told == "</>".join(f"<user>{text}" for text in texts)


def test_a_template_that_leaves_the_last_message_out_cannot_continue_it() -> None:
    source = "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}"
    with pytest.raises(BlockyardError) as raised:
        render(HI, HI, source=source, continue_final_message=True)
    assert raised.value.reason is Reason.FIELD_INVALID
    assert raised.value.violations[0].field == "conversation.continue_final_message"


def test_parts_are_lines() -> None:
    assert (join_parts([]), join_parts(["a"]), join_parts(["a", "", "b"])) == (None, "a", "a\n\nb")


def test_its_size_is_that_of_its_texts() -> None:
    bare = Conversation((Message(Role.USER),))
    for more in (
        replace(bare, messages=(Message(Role.USER, "x" * 1000),)),
        replace(bare, messages=(Message(Role.ASSISTANT, tool_calls=(ToolCall("f", "x" * 1000),)),)),
        replace(bare, messages=bare.messages * 100),
        replace(bare, tools=(Tool("f", "x" * 1000),)),
        replace(bare, tools=(Tool("f", "", "x" * 1000),)),
        replace(bare, template_arguments={"documents": ["x" * 1000]}),
    ):
        assert count_characters(more) >= count_characters(bare) + 1000
