"""Pages of other origins in a browser: what the HTTP front answers to its questions, on a real listener."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from blockyard.security.authentication import KeyGate
from blockyard.security.keys import Key, KeyRing, KeyRole, add_key, digest
from gateway.access import Access
from gateway.fronts.http.server import HttpFront

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

HERE, THERE = "https://chat.example.org", "http://localhost:3000"
KEY = {"authorization": "Bearer u"}
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}


def make_app() -> FastAPI:
    app = FastAPI()

    async def answer() -> Response:
        return Response("answer", headers={"x-request-id": "r"})

    async def events() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            yield "data: 1\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(pieces(), media_type="text/event-stream")

    app.add_api_route("/v1/chat/completions", answer, methods=["POST"])
    app.add_api_route("/v1/completions", events, methods=["POST"])
    return app


@asynccontextmanager
async def serving(access: Access | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    front = HttpFront(make_app(), access, **options)
    port = front.bind("127.0.0.1", 0)
    front.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as http:
            yield http
    finally:
        await front.stop()


@pytest.fixture
def keyed(tmp_path: Path) -> Access:
    path = tmp_path / "keys.yaml"
    add_key(path, Key(name="user", sha256=digest("u"), tenant="acme"))
    return Access(api=KeyGate(KeyRing(str(path)), KeyRole.USER))


async def test_without_origins_no_page_of_another_may_call() -> None:
    async with serving() as http:
        preflight = await http.options("/v1/chat/completions", headers={"origin": HERE, **ASKED})
        answer = await http.post("/v1/chat/completions", headers={"origin": HERE})
        assert preflight.status_code == 405
        for each in (preflight, answer):
            assert not [name for name in each.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("origin", [HERE, THERE])
async def test_a_page_of_an_allowed_origin_may_ask_without_a_key_and_call_with_one(keyed: Access, origin: str) -> None:
    async with serving(keyed, allowed_origins=f"{HERE}, {THERE}") as http:
        preflight = await http.options("/v1/chat/completions", headers={"origin": origin, **ASKED})
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == origin
        assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
        assert "POST" in preflight.headers["access-control-allow-methods"]
        answer = await http.post("/v1/chat/completions", headers={"origin": origin, **KEY})
        assert (answer.status_code, answer.text) == (200, "answer")
        assert answer.headers["access-control-allow-origin"] == origin
        exposed = answer.headers["access-control-expose-headers"]
        assert {"x-request-id", "retry-after", "retry-after-ms"} <= set(exposed.split(", "))


async def test_a_script_can_read_why_it_was_refused(keyed: Access) -> None:
    async with serving(keyed, allowed_origins=HERE) as http:
        refused = await http.post("/v1/chat/completions", headers={"origin": HERE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == HERE


async def test_a_stream_of_events_says_whose_page_may_read_it() -> None:
    async with (
        serving(allowed_origins="*") as http,
        http.stream("POST", "/v1/completions", headers={"origin": HERE}) as stream,
    ):
        assert stream.headers["access-control-allow-origin"] == "*"
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert [line async for line in stream.aiter_lines() if line] == ["data: 1", "data: [DONE]"]


async def test_another_origin_is_not_let_in() -> None:
    async with serving(allowed_origins=HERE) as http:
        preflight = await http.options("/v1/chat/completions", headers={"origin": "https://other.org", **ASKED})
        assert preflight.status_code == 400
        answer = await http.post("/v1/chat/completions", headers={"origin": "https://other.org"})
        assert "access-control-allow-origin" not in answer.headers


async def test_who_is_no_browser_sees_nothing_of_it() -> None:
    async with serving(allowed_origins=HERE) as http:
        answer = await http.post("/v1/chat/completions")
        assert answer.text == "answer"
        assert not [name for name in answer.headers if name.startswith("access-control-")]
