"""The small HTTP client against raw answers of a server on a socket."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason
from blockyard.load.http_stream import get_json, post_events
from tests.kit.fakes.fake_gateway import http_answer, sse_answer

if TYPE_CHECKING:
    from tests.kit.fakes.fake_gateway import FakeGateway

EVENTS = [{"text": "é\u2028x"}, {"text": "y" * 1000}, {}]


async def read(gateway: FakeGateway, body: Any = None) -> list[Any]:
    return [event async for event in post_events(f"{gateway.url}/v1/completions", body or {"a": 1})]


@pytest.mark.parametrize("piece_bytes", [1, 2, 7, 10_000])
async def test_events_in_chunks_that_cut_anywhere(async_gateway: FakeGateway, piece_bytes: int) -> None:
    async_gateway.http_answers.append(sse_answer(EVENTS, piece_bytes=piece_bytes))
    assert await read(async_gateway, {"prompt": "é"}) == EVENTS
    assert async_gateway.http_bodies == [{"prompt": "é"}]


@pytest.mark.parametrize("lines_end", ["\n", "\r\n"])
async def test_events_of_other_servers(async_gateway: FakeGateway, lines_end: str) -> None:
    content = "".join(f"event: x{lines_end}data:{json.dumps(event)}{lines_end * 2}" for event in EVENTS)
    content += f"data: [DONE]{lines_end * 2}"
    until_close = f"HTTP/1.1 200 OK\r\nX-A:  b \r\n\r\n{content}".encode()
    async_gateway.http_answers.extend([until_close, http_answer(content.encode())])
    assert await read(async_gateway) == EVENTS
    assert await read(async_gateway) == EVENTS


async def test_json(async_gateway: FakeGateway) -> None:
    assert (await get_json(f"{async_gateway.url}/v1/models"))["data"][0]["id"] == "fake"


async def test_an_address_is_a_url_too(async_gateway: FakeGateway) -> None:
    address = async_gateway.url.removeprefix("http://")
    assert (await get_json(f"{address}/v1/models"))["data"][0]["id"] == "fake"


@pytest.mark.parametrize(
    ("after", "told"), [("Retry-After: 2\r\n", 2.0), ("Retry-After: Fri, 1 Jan\r\n", None), ("", None)]
)
async def test_an_error_of_ours(async_gateway: FakeGateway, after: str, told: float | None) -> None:
    content = json.dumps({"error": {"message": "later", "code": "DRAINING"}}).encode()
    async_gateway.http_answers.append(http_answer(content, "503 Service Unavailable", after))
    with pytest.raises(BlockyardError) as caught:
        await read(async_gateway)
    error = caught.value
    assert (error.reason, error.message, error.retry_after_seconds) == (Reason.DRAINING, "later", told)


@pytest.mark.parametrize("content", [b"<html>Bad Gateway</html>", b'"text"', b"{}", b'{"error": {"code": "NEW"}}'])
async def test_an_error_of_somebody_else(async_gateway: FakeGateway, content: bytes) -> None:
    async_gateway.http_answers.append(http_answer(content, "502 Bad Gateway"))
    with pytest.raises(BlockyardError, match="HTTP 502") as caught:
        await read(async_gateway)
    assert caught.value.reason is Reason.BUG


async def test_an_error_in_the_midst_of_a_stream(async_gateway: FakeGateway) -> None:
    error = {"error": {"message": "gone", "code": "NO_READY_WORKER"}}
    async_gateway.http_answers.append(sse_answer([EVENTS[0], error]))
    events = post_events(async_gateway.url, {"a": 1})
    assert await anext(events) == EVENTS[0]
    with pytest.raises(BlockyardError, match="NO_READY_WORKER: gone"):
        await anext(events)


async def test_a_stream_without_its_end(async_gateway: FakeGateway) -> None:
    async_gateway.http_answers.append(sse_answer(EVENTS, done=False))
    with pytest.raises(BlockyardError, match="ended before its answer did"):
        await read(async_gateway)


@pytest.mark.parametrize("cut", [0, 10, 60, -8])
async def test_a_connection_that_breaks(async_gateway: FakeGateway, cut: int) -> None:
    async_gateway.http_answers.append(sse_answer(EVENTS)[:cut])
    with pytest.raises(BlockyardError, match="closed the connection") as caught:
        await read(async_gateway)
    assert caught.value.metadata == TRANSPORT_ORIGIN


async def test_nobody_there(unused_tcp_port: int) -> None:
    with pytest.raises(BlockyardError, match=f"cannot connect to 127.0.0.1:{unused_tcp_port}") as caught:
        await get_json(f"http://127.0.0.1:{unused_tcp_port}/v1/models")
    assert caught.value.reason is Reason.NO_READY_WORKER


async def test_leaving_early_closes_the_connection(async_gateway: FakeGateway) -> None:
    async_gateway.http_answers.append(sse_answer(EVENTS * 1000))
    async with aclosing(post_events(async_gateway.url, {"a": 1})) as events:
        assert await anext(events) == EVENTS[0]
