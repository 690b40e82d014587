"""A client that leaves ends its request, whatever the call was waiting for."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from gateway.fronts.openai.app import make_app
from tests.unit.gateway.fronts.openai.scripted import accepted, deltas

if TYPE_CHECKING:
    import httpx

    from tests.unit.gateway.fronts.openai.scripted import ScriptedService


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1, 4])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_client_that_leaves_aborts_its_requests(
    http: httpx.AsyncClient, service: ScriptedService, stream: bool, num_steps: int, prompt: Any
) -> None:
    service.script = lambda request: [*[accepted(request), *deltas("abc")][:num_steps], asyncio.Event()]
    call = asyncio.create_task(http.post("/v1/completions", json={"prompt": prompt, "stream": stream}))
    await asyncio.wait_for(service.started.wait(), 10)
    call.cancel()
    for generation in service.generations:
        await asyncio.wait_for(generation.closed.wait(), 10)


async def test_a_client_that_stops_reading_a_stream_aborts_it(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    service.script = lambda request: [accepted(request), *deltas("abc"), asyncio.Event()]
    async with http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as response:
        async for line in response.aiter_lines():
            if '"c"' in line:
                break
        assert not service.generations[0].closed.is_set()
    await asyncio.wait_for(service.generations[0].closed.wait(), 10)


async def test_the_end_of_the_process_aborts_what_runs(service: ScriptedService) -> None:
    """A server that cancels a call's task: the ASGI application is driven by hand."""
    app = make_app(service)
    service.script = lambda request: [accepted(request), *deltas("abc"), asyncio.Event()]
    sent: asyncio.Queue[Any] = asyncio.Queue()
    messages = [{"type": "http.request", "body": b'{"prompt": "a", "stream": true}', "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        return None

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    call = asyncio.create_task(app(scope, receive, sent.put))
    for _ in range(4):
        await asyncio.wait_for(sent.get(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert service.generations[0].closed.is_set()


async def test_a_client_that_leaves_before_its_body_is_there_starts_nothing(service: ScriptedService) -> None:
    app = make_app(service)
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    assert sent[0]["status"] == 499
    assert service.requests == []
