"""/v1/chat/completions by the real openai package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

if TYPE_CHECKING:
    from tests.unit.gateway_openai.scripted import ScriptedService

HELLO: Any = [{"role": "user", "content": "Hi"}]


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


async def test_passes_arguments_to_the_template(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    await client.chat.completions.create(model="scripted", messages=HELLO, extra_body=extra)
    assert service.requests[0].prompt == "user:Hi|enable_thinking=False"


async def test_does_not_let_them_replace_the_messages(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="must not name messages") as caught:
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
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
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
        (["x"], "messages[0]"),
        ("x", "messages"),
    ],
)
async def test_says_which_message_is_wrong(client: openai.AsyncOpenAI, messages: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="scripted", messages=messages)
    assert (caught.value.param, caught.value.code) == (param, "FIELD_INVALID")
