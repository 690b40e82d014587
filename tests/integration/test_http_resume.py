"""An HTTP client outlives everything but the weights: it sends the same call again, and is told exactly the rest."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx

from tests.kit.processes.cluster import ROOT, Cluster

if TYPE_CHECKING:
    from pathlib import Path

# The identifier of an event, and its data.
Event = tuple[str, str]
PLACE = "Last-Event-ID"
CHAT = {"messages": [{"role": "user", "content": "Tell me a story"}], "n": 2, "logprobs": True, "top_logprobs": 1}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["Once upon a time", "The dragon"], "stop": "never to be seen"},
    "/v1/chat/completions": CHAT,
}
SETTINGS = {"max_tokens": 120, "temperature": 1.0, "ignore_eos": True, "stream": True}
USAGE = {"stream_options": {"include_usage": True}}


async def read(http: httpx.AsyncClient, path: str, key: str, *, place: str = "", num_events: int = 0) -> list[Event]:
    """Posts a call and reads its events: all, or until so many with an id have come."""
    headers = {"Idempotency-Key": key, **({PLACE: place} if place else {})}
    body = {**BODIES[path], **SETTINGS, **USAGE, "seed": 5}
    events: list[Event] = []
    place = ""
    async with http.stream("POST", path, json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                place = value
            elif name == "data":
                events.append((place, value))
                place = ""
            if num_events and sum(bool(each) for each, _ in events) == num_events:
                break
    return events


def told(events: list[Event]) -> dict[str, Any]:
    """All that events tell of each choice, and what it cost."""
    all_of: dict[str, Any] = {"ends": events[-1][1]}
    for _, data in events:
        chunk = {} if data == "[DONE]" else json.loads(data)
        all_of["usage"] = chunk.get("usage") or all_of.get("usage")
        for choice in chunk.get("choices", ()):
            answer = all_of.setdefault(choice["index"], {"text": "", "logprobs": [], "finish_reason": None})
            answer["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            answer["logprobs"] += (choice.get("logprobs") or {}).get("content", [])
            answer["finish_reason"] = choice["finish_reason"] or answer["finish_reason"]
    return all_of


def has_text(events: list[Event]) -> bool:
    """Whether a part of the answers is in these events."""
    return any(index in (0, 1) and answer["text"] for index, answer in told(events).items())


async def kill_all_that_remember(cluster: Cluster) -> None:
    """Kills the scheduler and every gateway at once, and waits for the next ones."""
    names = [name for name in cluster.members if not name.startswith("worker")]
    deaths = {name: cluster.num_deaths(name) for name in names}
    for name in names:
        cluster.kill(name)
    async with asyncio.timeout(30):
        while any(cluster.num_deaths(name) == deaths[name] for name in names):  # noqa: ASYNC110 - other processes
            await asyncio.sleep(0.01)
    await cluster.wait_until_ready()


async def test_a_client_goes_on_when_gateways_and_scheduler_died_at_once(tmp_path: Path) -> None:
    async with Cluster(ROOT / "models" / "demo", tmp_path, replica_sizes=[1]) as cluster:
        await cluster.wait_until_ready()
        async with (
            httpx.AsyncClient(base_url=cluster.http_urls[0], timeout=60, verify=False) as first,
            httpx.AsyncClient(base_url=cluster.http_urls[1], timeout=60, verify=False) as second,
        ):
            wholes = [await read(first, path, f"whole-{number}") for number, path in enumerate(BODIES)]
            begun = [await read(first, path, f"mine-{number}", num_events=9) for number, path in enumerate(BODIES)]
            await kill_all_that_remember(cluster)
            for number, path in enumerate(BODIES):
                assert has_text(begun[number]), path
                rest = await read(second, path, f"mine-{number}", place=begun[number][-1][0])
                assert told(begun[number] + rest) == told(wholes[number]), path
                gone = await second.get(f"/v1/requests/whole-{number}/stream")
                assert gone.status_code in (404, 503)
