"""What the HTTP APIs say of time, and the ids that they draw, are those of the gateway's clock."""

from __future__ import annotations

from random import Random
from typing import Any

import httpx

from blockyard.clock import Clock
from gateway.fronts.http.server import make_http_app
from tests.unit.gateway.fronts.openai.scripted import ScriptedService

NOW = 1_700_000_000.0
MESSAGES = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 5, "model": "scripted"},
}


async def ask_all(seed: int) -> tuple[list[str], list[Any]]:
    """Asks each API once; returns the requests' ids and the times in the answers."""
    service = ScriptedService()
    service.clock = Clock(time=lambda: NOW, random=Random(seed))
    transport = httpx.ASGITransport(make_http_app(service))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        answers = [(await client.post(path, json=body)).raise_for_status().json() for path, body in CALLS.items()]
        models = (await client.get("/v1/models")).json()["data"]
        of_anthropic = (await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})).json()["data"]
    times = [answer.get("created", answer.get("created_at")) for answer in [*answers, *models, *of_anthropic]]
    return [request.request_id for request in service.requests], [time for time in times if time is not None]


async def test_a_seed_repeats_the_ids_of_all_apis() -> None:
    ids, times = await ask_all(1)
    assert [name.rpartition("-" if "-" in name else "_")[0] for name in ids] == ["cmpl", "chatcmpl", "resp", "msg"]
    assert {len(name.rpartition("-" if "-" in name else "_")[2]) for name in ids} == {32}
    assert (ids, times) == await ask_all(1)
    assert not set(ids) & set((await ask_all(2))[0])
    assert times == [NOW, NOW, NOW, NOW, "2023-11-14T22:13:20Z"]
