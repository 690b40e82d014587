"""Calls that outlive their connections over HTTP: the header, the ids of events, the stream again, and its end."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import Front, serving, spec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Event = tuple[str | None, Any]


@dataclass
class Gateway:
    """One gateway, over HTTP."""

    http: httpx.AsyncClient
    front: Front

    @asynccontextmanager
    async def stream(self, method: str, url: str, **options: Any) -> AsyncIterator[AsyncIterator[Event]]:
        """Gives the events of a stream as (id, data)."""
        async with self.http.stream(method, url, **options) as response:
            assert response.status_code == 200, await response.aread()
            yield _events(response)

    async def whole(self, body: dict[str, Any], **headers: str) -> list[Event]:
        """Reads a whole stream."""
        async with self.stream("POST", path_of(body), json=body | {"stream": True}, headers=headers) as events:
            return [event async for event in events]

    async def rest(self, call_id: str, last_event_id: str | None, **headers: str) -> list[Event]:
        """Reads a call again, behind an event."""
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        async with self.stream("GET", f"/v1/requests/{call_id}/stream", headers=headers) as events:
            return [event async for event in events]


async def _events(response: httpx.Response) -> AsyncIterator[Event]:
    event_id: str | None = None
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield event_id, data if data == "[DONE]" else json.loads(data)
            event_id = None


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler() as scheduler:
        yield scheduler


@asynccontextmanager
async def gateway_of(scheduler: FakeScheduler) -> AsyncIterator[Gateway]:
    async with (
        serving(scheduler) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        yield Gateway(http, front)


@pytest.fixture
async def gateway(scheduler: FakeScheduler) -> AsyncIterator[Gateway]:
    async with gateway_of(scheduler) as gateway:
        yield gateway


COMPLETION: dict[str, Any] = {"prompt": "Once", "max_tokens": 12, "seed": 3, "request_id": "mine"}
HELLO = {"role": "user", "content": "Hi"}
WELL = {"role": "assistant", "content": "Well,"}
CHAT: dict[str, Any] = {
    "messages": [HELLO],
    "max_tokens": 12,
    "seed": 3,
    "request_id": "mine",
    "n": 2,
}
BODIES: list[dict[str, Any]] = [
    COMPLETION,
    COMPLETION | {"n": 3, "stream_options": {"include_usage": True}},
    COMPLETION | {"prompt": ["a", "b c"], "n": 2, "echo": True, "stream_options": {"include_usage": True}},
    COMPLETION | {"return_token_ids": True, "logprobs": 1, "n": 2},
    COMPLETION | {"logprobs": 1, "echo": True, "stream_options": {"include_usage": True}},
    CHAT | {"stream_options": {"include_usage": True}},
    CHAT | {"logprobs": True, "prompt_logprobs": 1},
    COMPLETION | {"logprobs": 1, "echo": True, "return_tokens_as_token_ids": True, "truncate_prompt_tokens": 2},
    CHAT | {"logprobs": True, "echo": True, "return_tokens_as_token_ids": True, "messages": [HELLO, WELL]},
]


async def test_events_have_ids_that_name_their_places(gateway: Gateway) -> None:
    events = await gateway.whole(COMPLETION | {"max_tokens": 2})
    *deltas, finished, done = events
    assert done == (None, "[DONE]")
    assert finished[0] is not None and finished[0].endswith("f")
    texts = "".join(data["choices"][0]["text"] for _, data in deltas)
    assert deltas[-1][0] is not None and deltas[-1][0].startswith(f"0:2:{len(texts.encode())}:")


def told(events: list[Event]) -> Any:
    """All that events tell, however they were cut: what each choice got, in order, and what is told of the whole."""
    choices: dict[int, dict[str, Any]] = {}
    whole: list[Any] = []
    for _, data in events:
        if data == "[DONE]":
            whole.append(data)
            continue
        head = {name: data.get(name) for name in ("id", "object", "created", "model", "system_fingerprint")}
        whole += [each for each in (head, data.get("usage"), data.get("prompt_logprobs")) if each and each not in whole]
        for choice in data["choices"]:
            _add(choices.setdefault(choice["index"], {}), choice)
    return choices, whole


def _add(so_far: dict[str, Any], value: dict[str, Any]) -> None:
    """Joins texts and lists to those that came before."""
    for name, item in value.items():
        if isinstance(item, dict):
            _add(so_far.setdefault(name, {}), item)
        elif isinstance(item, str | list):
            so_far[name] = so_far[name] + item if name in so_far else item
        elif item is not None:
            so_far[name] = item


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("is_other", [False, True], ids=["same gateway", "another gateway"])
async def test_a_stream_goes_on_behind_any_of_its_events(
    scheduler: FakeScheduler, gateway: Gateway, body: dict[str, Any], is_other: bool
) -> None:
    whole = await gateway.whole(body)
    async with gateway_of(scheduler) as other:
        reader = other if is_other else gateway
        assert told(await reader.rest("mine", None)) == told(whole)
        places = [number for number, (event_id, _) in enumerate(whole) if event_id is not None]
        assert places
        for number in places:
            rest = await reader.rest("mine", whole[number][0])
            assert told(whole[: number + 1] + rest) == told(whole)


@pytest.mark.parametrize("body", BODIES)
async def test_a_stream_goes_on_behind_any_of_its_events_where_nobody_remembers_it(
    scheduler: FakeScheduler, gateway: Gateway, body: dict[str, Any]
) -> None:
    """Gateway and scheduler are gone: the same call, sent again, is generated again, and only the rest is sent."""
    whole = await gateway.whole(body)
    places = [number for number, (event_id, _) in enumerate(whole) if event_id is not None]
    for number in places:
        scheduler.forget()
        async with gateway_of(scheduler) as other:
            rest = await other.whole(body, **{"Last-Event-ID": whole[number][0] or ""})
        assert timeless(whole[: number + 1] + rest) == timeless(whole)


async def test_a_stream_whose_answer_became_another_ends_with_an_error(
    scheduler: FakeScheduler, gateway: Gateway
) -> None:
    """Nobody remembers it, and what is generated again does not continue what the client has: the weights changed."""
    whole = await gateway.whole(COMPLETION)
    place = str(whole[5][0])
    for known in (f"{place.rpartition(':')[0]}:01234567", "0:12:9999:01234567"):
        scheduler.forget()
        async with gateway_of(scheduler) as other:
            rest = await other.whole(COMPLETION, **{"Last-Event-ID": known})
            assert [data["error"]["reason"] for _, data in rest] == ["REQUEST_EXPIRED"]
            # Once it has ended, the same is known before the stream begins.
            await other.whole(COMPLETION)
            with pytest.raises(AssertionError, match="REQUEST_EXPIRED"):
                await other.whole(COMPLETION, **{"Last-Event-ID": "0:12:9999:01234567"})


def timeless(events: list[Event]) -> Any:
    """The same, but for when the call came first, which nobody remembers."""
    return told([(None, data if data == "[DONE]" else {**data, "created": 0}) for _, data in events])


@pytest.mark.parametrize("is_other", [False, True], ids=["same gateway", "another gateway"])
async def test_a_call_that_is_sent_again_goes_on_behind_an_event(
    scheduler: FakeScheduler, gateway: Gateway, is_other: bool
) -> None:
    """It runs still, or has just ended: nothing is generated again."""
    scheduler.pause()
    headers = {"Idempotency-Key": "mine"}
    body: dict[str, Any] = {"prompt": ["Once", "Twice"], "max_tokens": 12, "stream": True}
    async with gateway.stream("POST", "/v1/completions", json=body, headers=headers) as events:
        await scheduler.step(4)
        first = [await anext(events), await anext(events)]
    async with gateway_of(scheduler) as other:
        reader = other if is_other else gateway
        scheduler.go_on()
        rest = await reader.whole(body, **headers, **{"Last-Event-ID": first[-1][0] or ""})
        assert timeless(first + rest) == timeless(await reader.whole(body, **headers))
        different = await reader.http.post(
            "/v1/completions", json=body | {"max_tokens": 13}, headers={**headers, "Last-Event-ID": "0:1:1"}
        )
        assert different.status_code == 409
    assert len(scheduler.retained) == 2 and not scheduler.aborted


@pytest.mark.parametrize(
    ("place", "told_of"),
    [
        ("0:13:1", "Last-Event-ID[0].num_tokens"),
        ("1:1:1", "Last-Event-ID"),
    ],
)
async def test_a_place_that_the_answer_has_not_is_named(gateway: Gateway, place: str, told_of: str) -> None:
    headers = {"Idempotency-Key": "mine", "Last-Event-ID": place}
    body = {"prompt": "Once", "max_tokens": 12, "stream": True}
    response = await gateway.http.post("/v1/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["param"]) == (400, told_of)


async def test_a_place_needs_the_name_of_its_call(gateway: Gateway) -> None:
    body = {"prompt": "Once", "stream": True}
    response = await gateway.http.post("/v1/completions", json=body, headers={"Last-Event-ID": "0:1:1"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert "Idempotency-Key" in response.json()["error"]["message"]


async def test_a_key_lets_a_call_outlive_its_connection(scheduler: FakeScheduler, gateway: Gateway) -> None:
    scheduler.pause()
    body = {"prompt": "Once", "max_tokens": 12, "seed": 3, "stream": True}
    headers = {"Idempotency-Key": "mine"}
    async with gateway.stream("POST", "/v1/completions", json=body, headers=headers) as events:
        await scheduler.step(2)
        first = [await anext(events), await anext(events)]
    await gateway.front.wait_until_unread()
    scheduler.go_on()
    rest = await gateway.rest("mine", first[-1][0])
    again = await gateway.whole(body, **headers)
    assert told(first + rest) == told(again)
    assert scheduler.aborted == [] and len(scheduler.added) == 1


@pytest.mark.parametrize(
    ("added", "headers", "is_kept"),
    [
        ({}, {}, False),
        ({"on_disconnect": "keep"}, {}, True),
        ({}, {"Idempotency-Key": "mine"}, True),
        ({"on_disconnect": "abort"}, {"Idempotency-Key": "mine"}, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_lost_connection_means(
    scheduler: FakeScheduler,
    gateway: Gateway,
    added: dict[str, Any],
    headers: dict[str, str],
    is_kept: bool,
    stream: bool,
) -> None:
    scheduler.pause()
    body = {"prompt": ["a", "b"], "request_id": "mine", "stream": stream, **added}
    call = asyncio.create_task(gateway.http.post("/v1/completions", json=body, headers=headers))
    await scheduler.wait_until(lambda: scheduler.num_sequences == 2)
    call.cancel()
    await gateway.front.wait_until_unread()
    if is_kept:
        assert scheduler.aborted == []
        scheduler.go_on()
        assert (await gateway.rest("mine", None))[-1][1] == "[DONE]"
    else:
        await scheduler.wait_until(lambda: scheduler.num_sequences == 0)
        response = await gateway.http.get("/v1/requests/mine/stream")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "REQUEST_EXPIRED")


async def test_a_call_that_is_sent_again_is_the_same(scheduler: FakeScheduler, gateway: Gateway) -> None:
    headers = {"Idempotency-Key": "mine"}
    body = {"messages": CHAT["messages"], "max_tokens": 5}
    first, second = [
        (await gateway.http.post("/v1/chat/completions", json=body, headers=headers)).json() for _ in range(2)
    ]
    assert first == second and first["id"] == "mine"
    assert len(scheduler.added) == 1
    streamed = told(await gateway.whole(body, **headers))[0]
    assert streamed[0]["delta"]["content"] == first["choices"][0]["message"]["content"]
    other = await gateway.http.post("/v1/chat/completions", json=body | {"max_tokens": 6}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "REQUEST_ID_CONFLICT")


@pytest.mark.parametrize(
    ("method", "path", "headers", "param"),
    [
        ("POST", "/v1/completions", {"Idempotency-Key": "other"}, "request_id"),
        ("POST", "/v1/completions", {"Idempotency-Key": "a b"}, "Idempotency-Key"),
        ("POST", "/v1/completions", {"x-blockyard-tenant": "a/b"}, "x-blockyard-tenant"),
        ("GET", "/v1/requests/mine/stream", {"Last-Event-ID": "nonsense"}, "Last-Event-ID"),
        ("GET", "/v1/requests/mine/stream", {"Last-Event-ID": "1:1:1"}, "Last-Event-ID"),
        ("GET", "/v1/requests/mine/stream", {"Last-Event-ID": "0:9:1"}, "Last-Event-ID[0].num_tokens"),
        ("GET", "/v1/requests/mine/stream", {"Last-Event-ID": "0:1:999"}, "Last-Event-ID[0].num_text_bytes"),
        ("POST", "/v1/completions", {"Last-Event-ID": "nonsense"}, "Last-Event-ID"),
        ("POST", "/v1/completions", {"Last-Event-ID": "0:1:1"}, "Last-Event-ID"),
        ("GET", "/v1/requests/no%20id/stream", {}, "request_id"),
        ("GET", "/v1/requests/mine/stream", {"x-blockyard-tenant": ""}, "x-blockyard-tenant"),
        ("DELETE", "/v1/requests/mine", {"x-blockyard-tenant": "a/b"}, "x-blockyard-tenant"),
        ("DELETE", "/v1/requests/no%20id", {}, "request_id"),
    ],
)
async def test_what_is_wrong_is_named(
    gateway: Gateway, method: str, path: str, headers: dict[str, str], param: str
) -> None:
    body = {"prompt": "a", "request_id": "mine", "max_tokens": 3}
    assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200
    response = await gateway.http.request(method, path, headers=headers, json=body if method == "POST" else None)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("is_other", [False, True], ids=["same gateway", "another gateway"])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_call_is_cancelled_at_any_gateway(
    scheduler: FakeScheduler, gateway: Gateway, is_other: bool, prompt: Any
) -> None:
    scheduler.pause()
    body = {"prompt": prompt, "request_id": "mine", "on_disconnect": "keep"}
    call = asyncio.create_task(gateway.http.post("/v1/completions", json=body))
    await scheduler.wait_until(lambda: scheduler.num_sequences == (1 if isinstance(prompt, str) else 2))
    async with gateway_of(scheduler) as other:
        reader = other if is_other else gateway
        for expected in (True, False):
            response = await reader.http.delete("/v1/requests/mine")
            assert (response.status_code, response.json()) == (200, {"id": "mine", "cancelled": expected})
    assert (await call).json()["error"]["code"] == "CLIENT_CANCELLED"
    assert scheduler.num_sequences == 0


async def test_calls_belong_to_their_tenants(scheduler: FakeScheduler, gateway: Gateway) -> None:
    body = {"prompt": "a", "request_id": "mine", "max_tokens": 3}
    texts = set()
    for tenant in ("one", "two"):
        headers = {"x-blockyard-tenant": tenant}
        answer = (await gateway.http.post("/v1/completions", json=body, headers=headers)).json()
        texts.add(answer["choices"][0]["text"])
        streamed = told(await gateway.rest("mine", None, **headers))[0]
        assert streamed[0]["text"] == answer["choices"][0]["text"]
    # The seed is made of the tenant too.
    assert len(texts) == 2
    assert [add.request_id for add in scheduler.added] == ["one/mine", "two/mine"]
    assert (await gateway.http.get("/v1/requests/mine/stream")).status_code == 404


async def test_a_request_that_came_over_grpc_is_told_as_a_completion(gateway: Gateway) -> None:
    answer = await gateway.front.generate(spec(request_id="mine", n=2))
    choices, [head, done] = told(await gateway.rest("mine", None))
    assert [choices[index]["text"] for index in range(2)] == [choice.text for choice in answer.choices]
    assert (head["object"], head["id"], done) == ("text_completion", "mine", "[DONE]")


async def test_a_call_that_is_not_known_is_told_by_the_name_that_was_given(gateway: Gateway) -> None:
    response = await gateway.http.get("/v1/requests/mine/stream")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "REQUEST_EXPIRED")
    message = response.json()["error"]["message"]
    assert "mine" in message
    assert "mine-0" not in message


async def test_a_request_of_a_call_is_no_call(gateway: Gateway) -> None:
    body = {"prompt": ["a", "b"], "request_id": "mine", "max_tokens": 3}
    assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200
    response = await gateway.http.get("/v1/requests/mine-1/stream")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "REQUEST_EXPIRED")


async def test_a_stream_outlives_its_scheduler_and_its_gateway(scheduler: FakeScheduler, gateway: Gateway) -> None:
    whole = await gateway.whole(COMPLETION | {"request_id": "undisturbed"})
    scheduler.pause()
    body = COMPLETION | {"on_disconnect": "keep", "stream": True}
    async with gateway.stream("POST", "/v1/completions", json=body) as events:
        await scheduler.step(3)
        first = [await anext(events)]
        await scheduler.restart()
        await scheduler.wait_until(lambda: [add.request_id for add in scheduler.added].count("mine") == 2)
        await scheduler.step(2)
        while first[-1][0] is None or int(first[-1][0].split(":")[1]) < 5:
            first.append(await anext(events))
    async with gateway_of(scheduler) as other:
        await gateway.front.link.stop()
        scheduler.go_on()
        rest = await other.rest("mine", first[-1][0])
    texts = [told(events)[0][0]["text"] for events in (whole, first + rest)]
    assert texts[0] == texts[1]


async def test_what_it_costs_is_counted_on_in_every_chunk(scheduler: FakeScheduler, gateway: Gateway) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    whole = await gateway.whole(COMPLETION | {"stream_options": options})
    first = next(number for number, (event_id, _) in enumerate(whole) if event_id is not None)
    async with gateway_of(scheduler) as other:
        rest = await other.rest("mine", whole[first][0])
    counts = [data["usage"]["completion_tokens"] for _, data in whole[: first + 1] + rest[:-1]]
    assert counts == sorted(counts) and counts[-1] == 12
    assert rest[-2][1]["usage"] == whole[-2][1]["usage"]
