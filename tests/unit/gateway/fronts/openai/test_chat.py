"""/v1/chat/completions by the real openai package."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.unit.gateway.fronts.openai.scripted import ScriptedService

HELLO: Any = [{"role": "user", "content": "Hi"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "description": "does f", "parameters": {"type": "object", "properties": {}}},
}


def _call(name: str = "f", arguments: str = '{"a": 1}') -> Any:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


CALL: Any = _call()


async def test_answers_a_chat(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    told = await client.chat.completions.create(model="scripted", messages=HELLO)
    choice = told.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello", "stop")
    assert told.object == "chat.completion"
    assert told.usage is not None
    assert told.usage.completion_tokens == 5
    request = service.requests[0]
    assert request.prompt == "user:Hi|assistant:"
    assert request.stop.max_tokens is None
    assert request.request_id.startswith("chatcmpl-")


async def test_streams_a_chat(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="scripted", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [(c.choices[0].index, c.choices[0].delta.role) for c in chunks[:2]] == [(0, "assistant"), (1, "assistant")]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Hello", "Hello"]
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop", "stop"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10


async def test_the_clients_own_stream_reader_understands_it(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="scripted", messages=HELLO) as stream:
        told = await stream.get_final_completion()
    assert told.choices[0].message.content == "Hello"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_takes_the_length_under_both_names(
    client: openai.AsyncOpenAI, service: ScriptedService, name: str
) -> None:
    length: Any = {name: 9}
    await client.chat.completions.create(model="scripted", messages=HELLO, **length)
    assert service.requests[0].stop.max_tokens == 9


async def test_takes_every_form_of_a_message(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    messages: Any = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": []},
    ]
    await client.chat.completions.create(model="scripted", messages=messages)
    assert service.requests[0].prompt == "system:s|system:d|user:a\nb|assistant:|assistant:"


@pytest.mark.parametrize("content", ["def f(): pass", [{"type": "text", "text": "def f(): pass"}]])
async def test_takes_a_prediction(client: openai.AsyncOpenAI, service: ScriptedService, content: Any) -> None:
    prediction: Any = {"type": "content", "content": content}
    await client.chat.completions.create(model="scripted", messages=HELLO, prediction=prediction)
    assert service.requests[0].prediction == "def f(): pass"


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "edit", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content"),
    ],
)
async def test_says_what_is_wrong_with_a_prediction(client: openai.AsyncOpenAI, prediction: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.chat.completions.create(model="scripted", messages=HELLO, prediction=prediction)
    assert raised.value.param == param


async def test_passes_arguments_to_the_template(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    await client.chat.completions.create(model="scripted", messages=HELLO, extra_body=extra)
    assert service.requests[0].prompt == "user:Hi|enable_thinking=False"


async def test_does_not_let_them_replace_the_messages(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="must not set messages") as caught:
        await client.chat.completions.create(
            model="scripted", messages=HELLO, extra_body={"chat_template_kwargs": {"messages": []}}
        )
    assert caught.value.param == "chat_template_kwargs"


async def test_returns_token_ids_when_asked(client: openai.AsyncOpenAI) -> None:
    prompt = [ord(character) for character in "user:Hi|assistant:"]
    extra = {"return_token_ids": True}
    told: Any = await client.chat.completions.create(model="scripted", messages=HELLO, extra_body=extra)
    assert told.prompt_token_ids == prompt
    assert told.choices[0].token_ids == [ord(character) for character in "Hello"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages[0].audio"),
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ],
)
async def test_says_which_messages_are_not_supported(client: openai.AsyncOpenAI, message: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="scripted", messages=[message])
    assert (caught.value.param, caught.value.code) == (param, "UNSUPPORTED_PARAMETER")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "pilot", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": "x", "mood": "good"}], "messages[0].mood"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "type": 5}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [_call(name="")]}], "messages[0].tool_calls[0].function.name"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        (["x"], "messages[0]"),
        ("x", "messages"),
    ],
)
async def test_says_which_message_is_wrong(client: openai.AsyncOpenAI, messages: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="scripted", messages=messages)
    assert (caught.value.param, caught.value.code) == (param, "FIELD_INVALID")


async def test_the_template_is_given_tools(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    await client.chat.completions.create(model="scripted", messages=HELLO, tools=[TOOL], tool_choice="auto")
    # As they came: templates print them.
    assert service.requests[0].prompt == f"user:Hi|tool={json.dumps(TOOL['function'])}|assistant:"


async def test_tools_that_may_not_be_called_are_left_out(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    await client.chat.completions.create(model="scripted", messages=HELLO, tools=[TOOL], tool_choice="none")
    assert service.requests[0].prompt == "user:Hi|assistant:"


async def test_the_template_is_given_calls_of_tools_and_their_answers(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    messages: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "[1, 2]"},
    ]
    await client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    # Arguments are an object to a template, which prints it as JSON.
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    history = f'assistant:[tool_calls={json.dumps([call])}]|tool:[1, 2][tool_call_id="c1"]'
    assert history in str(service.requests[0].prompt)


@pytest.mark.parametrize(
    ("tool", "param", "code"),
    [
        ({"type": "function"}, "tools[0].function", "FIELD_INVALID"),
        ({"type": "retrieval", "function": {"name": "f"}}, "tools[0]", "UNSUPPORTED_PARAMETER"),
        ({"type": 5, "function": {"name": "f"}}, "tools[0].type", "FIELD_INVALID"),
        ({"type": "function", "function": {"name": "f", "parameters": "{}"}}, "tools[0].function.parameters", None),
        ({"type": "function", "function": {"name": "f", "x": 1}}, "tools[0].function.x", "FIELD_INVALID"),
        ({"type": "function", "function": {"name": ""}}, "tools[0].function.name", "FIELD_INVALID"),
        ({"type": "function", "function": {"name": "f", "strict": 5}}, "tools[0].function.strict", "FIELD_INVALID"),
    ],
)
async def test_says_which_tool_is_wrong(client: openai.AsyncOpenAI, tool: Any, param: str, code: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="scripted", messages=HELLO, tools=[tool])
    assert (caught.value.param, caught.value.code) == (param, code or "FIELD_INVALID")


async def test_a_template_is_the_operators_to_choose(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the gateway's --chat-template sets it") as caught:
        await client.chat.completions.create(
            model="scripted", messages=HELLO, extra_body={"chat_template": "{{ messages }}"}
        )
    assert (caught.value.param, caught.value.code) == ("chat_template", "UNSUPPORTED_PARAMETER")


async def test_the_answer_goes_on_with_the_final_message(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well,"}]
    for extra in ({"add_generation_prompt": False}, {}):
        await client.chat.completions.create(
            model="scripted", messages=messages, extra_body={"continue_final_message": True, **extra}
        )
    assert [request.prompt for request in service.requests] == ["user:Hi|assistant:Well,"] * 2
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="scripted",
            messages=messages,
            extra_body={"continue_final_message": True, "add_generation_prompt": True},
        )
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("role", "extra", "text"),
    [
        ("assistant", {"continue_final_message": True}, "Well,Hello"),
        ("assistant", {}, "Well,Hello"),
        ("user", {}, "Hello"),
        ("user", {"add_generation_prompt": False}, "Well,Hello"),
    ],
)
async def test_a_final_message_of_the_answers_role_is_echoed(
    client: openai.AsyncOpenAI, role: str, extra: dict[str, Any], text: str, stream: bool
) -> None:
    messages: Any = [*HELLO, {"role": role, "content": "Well,"}]
    told: Any = await client.chat.completions.create(
        model="scripted", messages=messages, n=2, stream=stream, logprobs=True, extra_body={"echo": True, **extra}
    )
    texts = ["", ""]
    if stream:
        async for chunk in told:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in told.choices]
    assert texts == [text, text]


async def test_documents_and_effort_are_variables_of_the_template(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    extra = {"documents": [{"title": "t"}], "chat_template_kwargs": {"mood": "good"}}
    await client.chat.completions.create(model="scripted", messages=HELLO, reasoning_effort="low", extra_body=extra)
    assert service.requests[0].prompt == (
        "user:Hi|documents=[{'title': 't'}]|reasoning_effort=low|mood=good|assistant:"
    )


async def test_everything_of_a_conversation_that_is_wrong_is_told_at_once(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "x", "tool_call_id": "1"}]
    nameless: Any = {"type": "function", "function": {"name": ""}}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="scripted",
            messages=messages,
            tools=[nameless],
            extra_body={"chat_template_kwargs": {"tools": []}},
        )
    told: Any = caught.value.body
    assert [violation["param"] for violation in told["violations"]] == [
        "messages[0].tool_call_id",
        "tools[0].function.name",
        "chat_template_kwargs",
    ]
