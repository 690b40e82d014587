"""Errors in OpenAI's form: as the openai package raises them, and as they are on the wire."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from blockyard.contract.events import Finished, Usage
from blockyard.contract.sampling import FinishReason
from blockyard.errors import TABLE, BlockyardError, Reason, Violation, invalid
from gateway.fronts.openai import errors
from gateway.fronts.openai.app import make_app
from tests.unit.gateway.fronts.openai.scripted import accepted, deltas, finished
from tests.unit.gateway.fronts.openai.serving import serve

if TYPE_CHECKING:
    from tests.unit.gateway.fronts.openai.scripted import ScriptedService

HELLO: Any = [{"role": "user", "content": "Hi"}]


async def post(http: httpx.AsyncClient, content: bytes | dict[str, Any], path: str = "/v1/completions") -> Any:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return await http.post(path, content=raw, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("reason", Reason)
async def test_every_reason_is_told_as_the_table_says(
    http: httpx.AsyncClient, service: ScriptedService, reason: Reason
) -> None:
    service.script = lambda request: [BlockyardError(reason, "so it is")]
    response = await post(http, {"prompt": "a"})
    assert response.status_code == TABLE[reason].http_status
    error = response.json()["error"]
    code = "context_length_exceeded" if reason is Reason.PROMPT_TOO_LONG else str(reason)
    message = "so it is (context_length_exceeded)" if reason is Reason.PROMPT_TOO_LONG else "so it is"
    told = {"message": message, "param": None, "code": code, "reason": str(reason)}
    assert error == {"type": error["type"], **told}
    assert response.headers["x-should-retry"] == "false"


async def test_every_violation_is_told_under_the_callers_names(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    fields = ["prompt", "sampling.top_p", "stop.max_tokens", "stop.stop_strings", "stop.include_stop_in_output", "n"]
    service.script = lambda request: [invalid([Violation(field, "is wrong") for field in fields])]
    error = (await post(http, {"prompt": "a", "max_tokens": 3})).json()["error"]
    assert error["param"] == "prompt"
    told = [violation["param"] for violation in error["violations"]]
    assert told == ["prompt", "top_p", "max_tokens", "stop", "include_stop_str_in_output", "n"]
    assert error["message"].startswith("prompt: is wrong; top_p: is wrong; ")
    chat = {"messages": HELLO, "max_completion_tokens": 3}
    error = (await post(http, chat, "/v1/chat/completions")).json()["error"]
    assert [violation["param"] for violation in error["violations"]][:3] == [
        "messages",
        "top_p",
        "max_completion_tokens",
    ]


def test_a_path_that_is_none_is_left_as_it_is() -> None:
    error = errors.rename(invalid([Violation("", "is wrong"), Violation("sampling.top_k[2]", "x")]), {})
    assert [violation.field for violation in error.violations] == ["", "top_k[2]"]


async def test_a_retry_is_offered_when_it_makes_sense(http: httpx.AsyncClient, service: ScriptedService) -> None:
    service.script = lambda request: [BlockyardError(Reason.DRAINING, "stopping", retry_after_seconds=1.25)]
    response = await post(http, {"prompt": "a"})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert response.headers["retry-after-ms"] == "1250"
    assert response.headers["x-should-retry"] == "true"


async def test_the_openai_package_retries_when_it_is_told_to(url: str, service: ScriptedService) -> None:
    service.script = lambda request: [BlockyardError(Reason.DRAINING, "stopping", retry_after_seconds=0.01)]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.completions.create(model="scripted", prompt="a")
    assert len(service.requests) == 3


async def test_the_openai_package_does_not_retry_what_cannot_get_better(url: str, service: ScriptedService) -> None:
    service.script = lambda request: [BlockyardError(Reason.NEVER_FITS, "too long")]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2) as client:
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model="scripted", prompt="a")
    assert len(service.requests) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_start_has_a_status_line(
    client: openai.AsyncOpenAI, service: ScriptedService, stream: bool
) -> None:
    def script(request: Any) -> Any:
        # After `start` and before Accepted: the scheduler refuses it.
        told = asyncio.Event()
        told.set()
        return [told, BlockyardError(Reason.NEVER_FITS, "too long")]

    service.script = script
    with pytest.raises(openai.BadRequestError, match="too long"):
        await client.completions.create(model="scripted", prompt="a", stream=stream)
    assert service.generations[0].closed.is_set()


async def test_the_second_of_two_prompts_fails_both(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    def script(request: Any) -> Any:
        if request.prompt == "bad":
            return [invalid([Violation("prompt", "is bad")])]
        return [accepted(request), asyncio.Event()]

    service.script = script
    with pytest.raises(openai.BadRequestError, match="prompt: is bad"):
        await client.completions.create(model="scripted", prompt=["good", "bad"])
    assert service.generations[0].closed.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_what_nobody_expects_of_one_prompt_ends_all(
    http: httpx.AsyncClient, service: ScriptedService, stream: bool
) -> None:
    service.script = lambda request: [
        *(accepted(request), *deltas("Hi")),
        RuntimeError("oh") if request.prompt == "b" else finished(2),
    ]
    async with asyncio.timeout(10):
        response = await post(http, {"prompt": ["a", "b"], "stream": stream})
    assert '"reason": "BUG"' in response.text
    assert all(generation.closed.is_set() for generation in service.generations)


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_failure_in_mid_stream_is_one_event_and_no_done(
    http: httpx.AsyncClient, service: ScriptedService, prompt: Any
) -> None:
    failure = BlockyardError(Reason.NO_READY_WORKER, "the worker is gone", retry_after_seconds=1)
    service.script = lambda request: [accepted(request), *deltas("Hi"), failure]
    response = await post(http, {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200
    events = [event.rpartition("data: ")[2] for event in response.text.strip().split("\n\n")]
    assert "[DONE]" not in events
    told = [json.loads(event) for event in events]
    assert [("error" in event) for event in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["error"]["code"] == "NO_READY_WORKER"
    assert all(choice["finish_reason"] is None for event in told[:-1] for choice in event["choices"])


def fail_prompts(service: ScriptedService, *prompts: str) -> None:
    """Has the requests of these prompts fail, each with its only sequence, behind "Hi"."""
    failure = BlockyardError(Reason.NOT_FINITE, "no numbers")

    def script(request: Any) -> Any:
        if request.prompt not in prompts:
            return [accepted(request), *deltas("Hey"), finished(3)]
        return [
            accepted(request),
            *deltas("Hi"),
            Finished(0, FinishReason.ERROR, None, Usage(1, 0, 2), "", error=failure),
        ]

    service.script = script


def chunks_of(response: httpx.Response) -> list[str]:
    return [event.rpartition("data: ")[2] for event in response.text.strip().split("\n\n")]


async def test_a_prompt_that_fails_leaves_the_others_their_answer(
    http: httpx.AsyncClient, service: ScriptedService
) -> None:
    fail_prompts(service, "bad")
    response = await post(http, {"prompt": ["bad", "good"]})
    assert response.status_code == 200
    bad, good = response.json()["choices"]
    assert (bad["text"], bad["finish_reason"], bad["error"]["code"]) == ("Hi", "error", "NOT_FINITE")
    assert bad["error"]["message"] == "no numbers"
    assert (good["text"], good["finish_reason"], "error" in good) == ("Hey", "stop", False)
    response = await post(http, {"prompt": ["bad", "good"], "stream": True})
    *chunks, done = chunks_of(response)
    assert done == "[DONE]"
    told = [choice for chunk in chunks for choice in json.loads(chunk)["choices"] if choice["finish_reason"]]
    assert sorted((choice["index"], choice["finish_reason"]) for choice in told) == [(0, "error"), (1, "stop")]
    assert [choice["error"]["code"] for choice in told if "error" in choice] == ["NOT_FINITE"]


@pytest.mark.parametrize("prompts", [["bad"], ["bad", "worse"]])
async def test_a_call_of_which_everything_fails_fails(
    http: httpx.AsyncClient, service: ScriptedService, prompts: list[str]
) -> None:
    fail_prompts(service, *prompts)
    response = await post(http, {"prompt": prompts})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "NOT_FINITE")
    response = await post(http, {"prompt": prompts, "stream": True, "stream_options": {"include_usage": True}})
    assert response.status_code == 200
    *chunks, last = map(json.loads, chunks_of(response))
    # Each choice has its finishing chunk, then the stream its error, and no [DONE].
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == list(range(len(prompts)))
    assert {choice["finish_reason"] for choice in ends} == {"error"}
    assert last["error"]["code"] == "NOT_FINITE"
    assert last["error"]["message"] == "no numbers"


async def test_the_openai_package_raises_a_failure_in_mid_stream(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    service.script = lambda request: [accepted(request), *deltas("Hi"), BlockyardError(Reason.BUG, "broken")]
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="broken") as caught:
        async for chunk in await client.completions.create(model="scripted", prompt="a", stream=True):
            texts.append(chunk.choices[0].text)
    assert texts == ["H", "i"]
    assert caught.value.code == "BUG"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_tells_nothing_of_itself(
    http: httpx.AsyncClient, service: ScriptedService, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    service.script = lambda request: [accepted(request), ValueError("a secret")]
    response = await post(http, {"prompt": "a", "stream": stream})
    assert response.status_code == (200 if stream else 500)
    assert "secret" not in response.text
    assert "BUG" in response.text
    assert any(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


async def test_an_unknown_model_is_told_before_anything_else(
    client: openai.AsyncOpenAI, service: ScriptedService
) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "MODEL_NOT_FOUND"
    assert service.requests == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("PUT", "/health", 405)],
)
async def test_what_no_route_takes_has_the_same_form(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    response = await http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert path in error["message"]
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_a_body_has_to_be_said_to_be_json(
    http: httpx.AsyncClient, service: ScriptedService, path: str, kind: str | None
) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = await http.post(path, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 415
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")
    assert "application/json" in error["message"]
    assert service.requests == []


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
async def test_json_may_be_said_in_several_ways(http: httpx.AsyncClient, kind: str) -> None:
    response = await http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert response.status_code == 200


async def test_routes_of_others_fail_in_the_same_form(service: ScriptedService) -> None:
    def refuse() -> None:
        raise BlockyardError(Reason.DRAINING, "stopping", retry_after_seconds=2)

    def break_down() -> None:
        raise ValueError("a secret")

    def count(number: int) -> int:
        return number

    app = make_app(service)
    for path, endpoint in (("/refused", refuse), ("/broken", break_down), ("/count/{number}", count)):
        app.add_api_route(path, endpoint, methods=["GET"])
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http:
        refused, broken = await http.get("/refused"), await http.get("/broken")
        counted, wrong = await http.get("/count/3"), await http.get("/count/many")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert refused.json()["error"]["code"] == "DRAINING"
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "BUG")
    assert "secret" not in broken.text
    assert counted.json() == 3
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "number")
