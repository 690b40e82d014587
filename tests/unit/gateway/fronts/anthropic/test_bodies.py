"""What the Anthropic front makes of bodies: those that agents send, and those that it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_create_params as beta_params

from blockyard.contract.chat import Conversation, Message, Role, Tool, ToolCall, ToolChoice
from blockyard.contract.request import JsonSchema
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.fronts.anthropic.call import understand
from gateway.fronts.anthropic.errors import rename
from gateway.fronts.anthropic.schema import CountBody, MessagesBody
from gateway.fronts.http_calls.bodies import parse_body
from tests.unit.gateway.fronts.anthropic.agents import CODING_AGENT, TITLE_OF_AGENT

if TYPE_CHECKING:
    from gateway.request import GenerationRequest

ASKED: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}


def request_of(body: dict[str, Any]) -> GenerationRequest:
    return understand(MessagesBody.model_validate(body), "").request


def conversation_of(body: dict[str, Any]) -> Conversation:
    prompt = request_of(body).prompt
    assert isinstance(prompt, Conversation)
    return prompt


def refusal_of(kind: type[MessagesBody | CountBody] = MessagesBody, **fields: Any) -> BlockyardError:
    with pytest.raises(BlockyardError) as caught:
        parse_body(kind, json.dumps(ASKED | fields).encode())
    return caught.value


def test_a_coding_agents_turn_becomes_a_conversation() -> None:
    conversation = conversation_of(CODING_AGENT)
    system, user, assistant, first, second, rest = conversation.messages
    # Without the line that is for a provider, and changes with every request.
    assert system == Message(Role.SYSTEM, "You are a coding agent.\nThe directory is /src.")
    assert user.content == "<system-reminder>\nToday is Monday.\n</system-reminder>\nFix the test."
    assert assistant == Message(
        Role.ASSISTANT,
        "I look.",
        tool_calls=(
            ToolCall("Read", '{"file_path": "/src/a.py", "limit": 5}', "toolu_1"),
            ToolCall("Bash", '{"command": "ls"}', "toolu_2"),
        ),
        reasoning_content="A file first.",
    )
    assert first == Message(Role.TOOL, "1\tdef f():", tool_call_id="toolu_1")
    assert second == Message(Role.TOOL, "ls: not found", tool_call_id="toolu_2")
    assert rest == Message(Role.USER, "Go on.")
    assert conversation.tools == (
        Tool("Read", "Reads a file.", '{"type": "object", "properties": {"file_path": {"type": "string"}}}'),
        Tool("Bash", "", '{"type": "object"}'),
    )
    assert conversation.template_arguments == {"enable_thinking": True, "reasoning_effort": "high"}
    assert not conversation.continue_final_message


BILLING = "x-anthropic-billing-header: cc_version=2.1.9.ab3; cch=1f2e3;"


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        (BILLING, None),
        (f"{BILLING}\n", None),
        (f"{BILLING}\nBe brief.\nBe kind.", "Be brief.\nBe kind."),
        (f"{BILLING}\r\nBe brief.", "Be brief."),
        (f"{BILLING}\n\nBe brief.", "\nBe brief."),
        (f"Be brief.\n{BILLING}", f"Be brief.\n{BILLING}"),
        ([BILLING], None),
        ([BILLING, "Be brief."], "Be brief."),
        (["Be kind.", f"{BILLING}\nBe brief."], "Be kind.\nBe brief."),
        ([f"{BILLING}\nBe brief.", "", "Be kind."], "Be brief.\n\nBe kind."),
    ],
)
def test_of_the_systems_text_the_line_for_a_provider_alone_is_left_out(system: Any, expected: str | None) -> None:
    content = system if isinstance(system, str) else [{"type": "text", "text": text} for text in system]
    hi = {"role": "user", "content": "Hi"}
    told = conversation_of(ASKED | {"system": content, "messages": [hi]}).messages
    assert told == ((Message(Role.SYSTEM, expected),) if expected else ()) + (Message(Role.USER, "Hi"),)
    told = conversation_of(ASKED | {"messages": [hi, {"role": "system", "content": content}]}).messages
    assert told == (Message(Role.USER, "Hi"), Message(Role.SYSTEM, expected))


def test_what_the_user_and_tools_say_is_left_whole() -> None:
    text = f"{BILLING}\nWhat is that?"
    result = {"type": "tool_result", "tool_use_id": "t", "content": text}
    messages = conversation_of(
        ASKED | {"messages": [{"role": "user", "content": [result, {"type": "text", "text": text}]}]}
    )
    assert [each.content for each in messages.messages] == [text, text]


def test_an_answer_goes_on_with_a_final_message_of_the_assistant() -> None:
    conversation = conversation_of(TITLE_OF_AGENT)
    assert conversation.continue_final_message
    assert conversation.messages[-1] == Message(Role.ASSISTANT, "{")


@pytest.mark.parametrize(
    ("asked", "choice", "named", "is_one"),
    [
        (None, ToolChoice.AUTO, "", False),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice.AUTO, "", True),
        ({"type": "any"}, ToolChoice.REQUIRED, "", False),
        ({"type": "tool", "name": "t"}, ToolChoice.REQUIRED, "t", False),
        ({"type": "none"}, ToolChoice.NONE, "", False),
    ],
)
def test_the_choice_of_a_tool(asked: Any, choice: ToolChoice, named: str, is_one: bool) -> None:
    tool = {"name": "t", "input_schema": {"type": "object"}, "strict": True}
    conversation = conversation_of(ASKED | {"tools": [tool], "tool_choice": asked})
    assert (conversation.tool_choice, conversation.named_tool, conversation.one_tool_call) == (choice, named, is_one)
    assert conversation.parse_answer
    assert conversation.tools[0].strict


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_the_form_of_an_answer_is_a_schema(name: str) -> None:
    output: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
    fields = {"output_config": {"format": output}} if name == "output_config" else {"output_format": output}
    assert request_of(ASKED | fields).format == JsonSchema('{"type": "object"}')


def test_what_is_wrong_with_a_schema_has_its_place_in_the_body() -> None:
    error = rename(invalid([Violation("format.json_schema.schema.properties.a.not", "is not supported")]))
    assert [each.field for each in error.violations] == ["output_config.format.schema.properties.a.not"]


def test_what_is_wrong_with_a_tool_has_its_place_in_the_body() -> None:
    fields = ("conversation.tools[0].parameters", "conversation.tools[1].name")
    error = rename(invalid([Violation(field, "is wrong") for field in fields]))
    assert [each.field for each in error.violations] == ["tools[0].input_schema", "tools[1].name"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "u"}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
        ({"thinking": {"type": "between_tools"}}, "thinking"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "t", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content"),
        ({"system": [{"type": "document"}]}, "system"),
    ],
)
def test_what_the_api_knows_and_is_not_served_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    error = refusal_of(**fields)
    assert [(each.field, each.reason) for each in error.violations] == [(named, Reason.UNSUPPORTED_PARAMETER)]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temprature": 1}, "temprature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ],
)
def test_what_nobody_knows_is_wrong(fields: dict[str, Any], named: str) -> None:
    assert [(each.field, each.reason) for each in refusal_of(**fields).violations] == [(named, Reason.FIELD_INVALID)]


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (message_create_params.MessageCreateParamsStreaming, MessagesBody),
        (beta_params.MessageCreateParamsStreaming, MessagesBody),
        (message_count_tokens_params.MessageCountTokensParams, CountBody),
    ],
)
def test_every_parameter_of_the_client_is_known(params: Any, body: type[MessagesBody | CountBody]) -> None:
    assert set(params.__annotations__) | set(get_type_hints(params)) <= set(body.model_fields)
