"""What the Responses front makes of bodies: those that agents send, and those that it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import response_create_params

from blockyard.contract.chat import Conversation, Message, Role, Tool, ToolCall, ToolChoice
from blockyard.contract.request import JsonObject, JsonSchema
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.fronts.http_calls.bodies import parse_body
from gateway.fronts.responses.call import rename, understand
from gateway.fronts.responses.schema import ResponseBody

# A turn in the middle of a task, as a coding agent sends it; written by hand.
CODING_AGENT: dict[str, Any] = {
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "The directory is /src."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the test."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "A file first."}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            "id": "msg_1",
            "status": "completed",
        },
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["cat","a"]}', "call_id": "call_2"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a\n"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "1"}]},
        {"role": "assistant", "content": "Done?"},
        {"role": "user", "content": "Go on."},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
        }
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198",
}


def conversation_of(body: dict[str, Any]) -> Conversation:
    prompt = understand(ResponseBody.model_validate(body), "", 0).request.prompt
    assert isinstance(prompt, Conversation)
    return prompt


def test_a_coding_agents_turn_becomes_a_conversation() -> None:
    conversation = conversation_of(CODING_AGENT)
    assert conversation.messages == (
        Message(Role.SYSTEM, "You are a coding agent."),
        Message(Role.DEVELOPER, "The directory is /src."),
        Message(Role.USER, "Fix the test."),
        Message(
            Role.ASSISTANT,
            "I look.",
            tool_calls=(
                ToolCall("shell", '{"command":["ls"]}', "call_1"),
                ToolCall("shell", '{"command":["cat","a"]}', "call_2"),
            ),
            reasoning_content="A file first.",
        ),
        Message(Role.TOOL, "a\n", tool_call_id="call_1"),
        Message(Role.TOOL, "1", tool_call_id="call_2"),
        Message(Role.ASSISTANT, "Done?"),
        Message(Role.USER, "Go on."),
    )
    parameters = '{"type": "object", "properties": {"command": {"type": "array"}}}'
    assert conversation.tools == (Tool("shell", "Runs a command.", parameters),)
    assert conversation.template_arguments == {"reasoning_effort": "medium"}


def test_answers_that_follow_each_other_stay_apart() -> None:
    said = {"role": "assistant", "content": "A"}
    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "S"}]}
    messages = conversation_of({"input": [said, call, said, thought, call]}).messages
    assert messages == (
        Message(Role.ASSISTANT, "A", tool_calls=(ToolCall("f", "{}", "c"),)),
        Message(Role.ASSISTANT, "A"),
        Message(Role.ASSISTANT, None, tool_calls=(ToolCall("f", "{}", "c"),), reasoning_content="S"),
    )


@pytest.mark.parametrize(
    ("asked", "choice", "named"),
    [
        ("none", ToolChoice.NONE, ""),
        ("required", ToolChoice.REQUIRED, ""),
        ({"type": "function", "name": "t"}, ToolChoice.REQUIRED, "t"),
    ],
)
def test_the_choice_of_a_tool(asked: Any, choice: ToolChoice, named: str) -> None:
    tool = {"type": "function", "name": "t", "parameters": {"type": "object"}, "strict": True}
    conversation = conversation_of({"input": "Hi", "tools": [tool], "tool_choice": asked, "parallel_tool_calls": False})
    assert (conversation.tool_choice, conversation.named_tool) == (choice, named)
    assert (conversation.one_tool_call, conversation.parse_answer, conversation.tools[0].strict) == (True, True, True)


@pytest.mark.parametrize(("mode", "choice"), [("auto", ToolChoice.AUTO), ("required", ToolChoice.REQUIRED)])
def test_the_choice_of_several_tools(mode: str, choice: ToolChoice) -> None:
    named = {"type": "function", "name": "t"}
    asked: dict[str, Any] = {"type": "allowed_tools", "mode": mode, "tools": [named]}
    conversation = conversation_of({"input": "Hi", "tools": [named, named | {"name": "u"}], "tool_choice": asked})
    assert (conversation.tool_choice, conversation.named_tool, conversation.allowed_tools) == (choice, "", ("t",))
    assert len(conversation.tools) == 2
    body = ResponseBody.model_validate({"input": "Hi", "tool_choice": asked})
    assert understand(body, "", 0).echo["tool_choice"] == asked
    for wrong in ({"mode": "none"}, {"tools": []}, {"tools": [{"type": "function"}]}, {"tools": None}, {"name": "t"}):
        with pytest.raises(BlockyardError, match=r"should be \{'type': 'allowed_tools'") as caught:
            parse_body(ResponseBody, json.dumps({"input": "Hi", "tool_choice": asked | wrong}).encode())
        assert [each.field for each in caught.value.violations] == ["tool_choice"]


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, JsonObject()),
        (
            {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True},
            JsonSchema('{"type": "object"}'),
        ),
    ],
)
def test_the_form_of_an_answer(asked: dict[str, Any], form: object) -> None:
    body = ResponseBody.model_validate({"input": "Hi", "text": {"format": asked}})
    call = understand(body, "", 0)
    assert call.request.format == form
    assert call.echo["text"]["format"] == asked


def test_a_form_without_its_schema_is_wrong() -> None:
    with pytest.raises(BlockyardError, match="must have a schema if its type is 'json_schema'"):
        parse_body(ResponseBody, b'{"input": "Hi", "text": {"format": {"type": "json_schema", "name": "n"}}}')


def test_what_is_wrong_with_a_schema_has_its_place_in_the_body() -> None:
    error = rename(invalid([Violation("format.json_schema.schema.properties.a.not", "is not supported")]))
    assert [each.field for each in error.violations] == ["text.format.schema.properties.a.not"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"input": [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": "i"}]}, "input[1]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ],
)
def test_what_the_api_knows_and_is_not_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BlockyardError) as caught:
        parse_body(ResponseBody, json.dumps({"input": "Hi"} | fields).encode())
    assert [(each.field, each.reason) for each in caught.value.violations] == [(named, Reason.UNSUPPORTED_PARAMETER)]


def test_who_asks_for_memory_is_told_what_to_do() -> None:
    with pytest.raises(BlockyardError, match="send the earlier items of the conversation in input"):
        parse_body(ResponseBody, json.dumps({"input": "Hi", "store": True}).encode())


@pytest.mark.parametrize("kind", [{}, None])
def test_a_type_that_is_no_text_is_wrong(kind: Any) -> None:
    item = {"type": kind, "role": "user", "content": ""}
    with pytest.raises(BlockyardError) as caught:
        parse_body(ResponseBody, json.dumps({"input": [item]}).encode())
    assert [each.field for each in caught.value.violations] == ["input[0]"]


def test_what_nobody_knows_is_wrong() -> None:
    with pytest.raises(BlockyardError) as caught:
        parse_body(ResponseBody, b'{"input": "Hi", "temprature": 1}')
    assert [each.field for each in caught.value.violations] == ["temprature"]


def test_every_parameter_of_the_client_is_known() -> None:
    params = response_create_params.ResponseCreateParamsStreaming
    names = set(params.__annotations__) | set(response_create_params.ResponseCreateParamsBase.__annotations__)
    assert names <= set(ResponseBody.model_fields)
