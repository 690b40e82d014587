"""Loops of agents, and parsed answers, with the clients of OpenAI and Anthropic; the model follows a script."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anthropic
import httpx
import httpx2
import openai
from pydantic import BaseModel

from gateway.text.tokenizer_files import load_tokenizer
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.fronts.parity.agents import SCHEMA, TEMPLATE
from tests.unit.gateway.harness import DEMO_MODEL, END_OF_TURN, ids_of, serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

CALL = 'I look.<tool_call>{"name": "read", "arguments": {"path": "a \\"b\\""}}</tool_call>'
FUNCTION: dict[str, Any] = {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}
CONTENT = "The file's content."


class Sum(BaseModel):
    """What an answer is parsed into."""

    total: int
    words: list[str]


SUM = Sum(total=3, words=["a", "b"])


def read(path: str) -> str:
    assert path == 'a "b"'
    return CONTENT


@asynccontextmanager
async def url_of_answers(*texts: str) -> AsyncGenerator[tuple[str, FakeScheduler], None]:
    """A gateway that answers its requests with these texts, one after another."""
    answers = [ids_of(text) for text in texts]

    def script(request: Any, _index: int, position: int) -> int:
        turn = [each.request_id for each in scheduler.added].index(request.request_id)
        return answers[turn][position] if position < len(answers[turn]) else END_OF_TURN

    tokenizer = load_tokenizer(DEMO_MODEL, chat_template_file=TEMPLATE)
    async with (
        FakeScheduler(script=script) as scheduler,
        serving(scheduler, tokenizer=tokenizer) as front,
        serve_openai(front.service) as url,
    ):
        yield url, scheduler


@asynccontextmanager
async def openai_client(url: str) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with httpx.AsyncClient(timeout=20, verify=False) as http:
        connection: Any = http
        yield openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=connection)


@asynccontextmanager
async def anthropic_client(url: str) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with httpx2.AsyncClient(timeout=20, verify=False) as http:
        yield anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0, http_client=http)


async def test_openais_client_runs_a_loop_over_chats() -> None:
    async with url_of_answers(CALL, "Done.") as (url, scheduler), openai_client(url) as client:
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        while True:
            tools: Any = [{"type": "function", "function": FUNCTION}]
            stream = client.chat.completions.stream(model="demo", messages=messages, tools=tools)
            async with stream as events:
                message = (await events.get_final_completion()).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                answer = read(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
        assert (message.content, len(scheduler.added)) == ("Done.", 2)


async def test_openais_client_runs_a_loop_over_responses() -> None:
    async with url_of_answers(CALL, "Done.") as (url, scheduler), openai_client(url) as client:
        items: list[Any] = [{"role": "user", "content": "Go."}]
        while True:
            tools: Any = [{"type": "function", **FUNCTION, "strict": False}]
            async with client.responses.stream(model="demo", input=items, tools=tools) as events:
                response = await events.get_final_response()
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                break
            for call in calls:
                answer = read(**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": answer})
        assert (response.output_text, len(scheduler.added)) == ("Done.", 2)


async def test_anthropics_client_runs_a_loop() -> None:
    async with url_of_answers(CALL, "Done.") as (url, scheduler), anthropic_client(url) as client:
        messages: list[Any] = [{"role": "user", "content": "Go."}]
        while True:
            tools: Any = [{"name": "read", "description": "Reads a file.", "input_schema": SCHEMA}]
            asked: dict[str, Any] = {"model": "demo", "max_tokens": 100, "messages": messages, "tools": tools}
            async with client.messages.stream(**asked) as events:
                message = await events.get_final_message()
            messages.append(message.to_param())
            if message.stop_reason != "tool_use":
                break
            uses: list[Any] = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": read(**use.input)} for use in uses]
            messages.append({"role": "user", "content": results})
        assert (message.content[0].text, len(scheduler.added)) == ("Done.", 2)  # type: ignore[union-attr]


async def test_answers_are_parsed_by_each_client() -> None:
    async with url_of_answers(*[SUM.model_dump_json()] * 3) as (url, scheduler):
        async with openai_client(url) as client:
            chat = await client.chat.completions.parse(
                model="demo", messages=[{"role": "user", "content": "Go."}], response_format=Sum
            )
            response = await client.responses.parse(model="demo", input="Go.", text_format=Sum)
        async with anthropic_client(url) as other:
            message = await other.messages.parse(
                model="demo", max_tokens=100, messages=[{"role": "user", "content": "Go."}], output_format=Sum
            )
        assert [chat.choices[0].message.parsed, response.output_parsed, message.parsed_output] == [SUM, SUM, SUM]
        assert all('"total"' in added.sampling.grammar for added in scheduler.added)
