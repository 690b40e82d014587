"""Responses in the background, on the gateway's real core."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import serving

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

ASKED: dict[str, Any] = {"model": "demo", "input": "Tell me a story", "max_output_tokens": 24, "background": True}


@asynccontextmanager
async def client_of(scheduler: FakeScheduler) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    """A client of a gateway of its own."""
    async with (
        serving(scheduler) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        connection: Any = http
        yield openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=connection)


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler() as scheduler:
        yield scheduler


@pytest.fixture
async def client(scheduler: FakeScheduler) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(scheduler) as client:
        yield client


async def test_a_response_in_the_background_is_read_later(client: openai.AsyncOpenAI) -> None:
    begun = await client.responses.create(**ASKED, instructions="Be brief.")
    assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
    stream = await client.responses.retrieve(begun.id, stream=True)
    events: list[Any] = [event async for event in stream]
    told = await client.responses.retrieve(begun.id)
    assert told == events[-1].response
    assert (told.status, told.instructions, told.created_at) == ("incomplete", "Be brief.", begun.created_at)


async def test_a_stream_is_resumed_behind_an_event(client: openai.AsyncOpenAI) -> None:
    events: list[Any] = []
    async with await client.responses.create(**ASKED, stream=True) as stream:
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
    response_id, place = events[0].response.id, events[-1].sequence_number
    rest: list[Any] = []
    async for event in await client.responses.retrieve(response_id, stream=True, starting_after=place):
        rest.append(event)
    assert min(event.sequence_number for event in rest) > place
    said = "".join(event.delta for event in (*events, *rest) if event.type == "response.output_text.delta")
    assert said == rest[-1].response.output_text != ""


async def test_a_response_in_the_background_is_cancelled(client: openai.AsyncOpenAI) -> None:
    unbounded: dict[str, Any] = ASKED | {"max_output_tokens": None}
    begun = await client.responses.create(**unbounded)
    cancelled = await client.responses.cancel(begun.id)
    assert (cancelled.id, cancelled.status) == (begun.id, "cancelled")


async def test_any_gateway_has_it(client: openai.AsyncOpenAI, scheduler: FakeScheduler) -> None:
    begun = await client.responses.create(**ASKED, instructions="Be brief.")
    async with client_of(scheduler) as other:
        events: list[Any] = [event async for event in await other.responses.retrieve(begun.id, stream=True)]
        told = await other.responses.retrieve(begun.id)
    assert told == events[-1].response == await client.responses.retrieve(begun.id)
    assert (told.status, told.instructions) == ("incomplete", "Be brief.")


async def test_others_are_not_known(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve("resp_none")
    chat = await client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Hi"}], max_tokens=3, extra_body={"on_disconnect": "keep"}
    )
    with pytest.raises(openai.NotFoundError, match="not a background response"):
        await client.responses.retrieve(chat.id)
