"""Errors in OpenAI's form: as the openai package raises them, and as they are on the wire."""

from __future__ import annotations

import asyncio
import json
import logging
import typing
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from blockyard.errors import TABLE, BlockyardError, Reason, Violation, invalid
from blockyard.service.servers import PUBLIC_MESSAGE_BYTES
from gateway.fronts.openai import errors
from gateway.fronts.openai.app import make_app
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.request import Finished, FinishReason
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
        return [accepted(request), *deltas("Hi"), Finished(0, FinishReason.ERROR, None, 1, 0, 2, "", error=failure)]

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


async def test_all_of_a_bodys_shape_is_told_at_once(http: httpx.AsyncClient) -> None:
    body = {"prompt": 5, "n": "x", "temprature": 1, "suffix": "x", "stream_options": {"include_usage": True, "x": 1}}
    response = await post(http, {**body, "stream": True})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    told = {violation["param"]: violation["code"] for violation in error["violations"]}
    assert told == {
        "prompt": "FIELD_INVALID",
        "n": "FIELD_INVALID",
        "temprature": "FIELD_INVALID",
        "suffix": "UNSUPPORTED_PARAMETER",
        "stream_options.x": "FIELD_INVALID",
    }


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"7",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": "a"} x',
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await post(http, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("FIELD_INVALID", None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": True}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]], "n": 1}, None),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": "a", "stop": ["a", 1]}, "stop"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 1.5}, "n"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stop_token_ids": ["x"] * 1000}, "stop_token_ids[0]"),
    ],
)
async def test_a_wrong_type_is_named(http: httpx.AsyncClient, body: dict[str, Any], param: str | None) -> None:
    response = await post(http, body)
    if param is None:
        # The shape is right; the core says that a prompt has to have tokens.
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (response.status_code, error["param"], len(error["violations"])) == (400, param, 1)


@pytest.mark.parametrize(
    ("path", "body", "param", "count"),
    [
        ("/v1/completions", {"prompt": "a", **{f"x{i}": 1 for i in range(1000)}}, "x0", 64),
        ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(5000)}}, "logit_bias", 1),
        ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(1000)}}, "logit_bias.x0", 100),
        ("/v1/chat/completions", {"messages": [{}] * 5000}, "messages", 1),
        ("/v1/chat/completions", {"messages": [{}] * 1000}, "messages[0].role", 1),
        ("/v1/chat/completions", {"messages": HELLO, "metadata": {str(i): 1 for i in range(1000)}}, "metadata", 1),
    ],
)
async def test_a_body_full_of_errors_is_not_told_all_of_them(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str, count: int
) -> None:
    error = (await post(http, body, path)).json()["error"]
    assert (error["param"], len(error["violations"])) == (param, count)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [
        ("/v1/completions", "suffix", "x"),
        ("/v1/completions", "best_of", 2),
        ("/v1/completions", "cache_salt", "x"),
        ("/v1/completions", "guided_regex", "x"),
        ("/v1/completions", "truncation_side", "right"),
        ("/v1/completions", "prompt_embeds", "x"),
        ("/v1/chat/completions", "tool_choice", "required"),
        ("/v1/chat/completions", "tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("/v1/chat/completions", "functions", [{"name": "f"}]),
        ("/v1/chat/completions", "chat_template", "{{ messages }}"),
        ("/v1/chat/completions", "add_special_tokens", True),
        ("/v1/chat/completions", "response_format", {"type": "json_object"}),
        ("/v1/chat/completions", "modalities", ["text", "audio"]),
    ],
)
async def test_what_is_not_served_yet_is_refused(http: httpx.AsyncClient, path: str, name: str, value: Any) -> None:
    response = await post(
        http, {"prompt": "a"} | {name: value} if "chat" not in path else {"messages": HELLO, name: value}, path
    )
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "UNSUPPORTED_PARAMETER", name)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True, "use_beam_search": False}, "early_stopping"),
        ({"early_stopping": "sometimes", "use_beam_search": True}, "early_stopping"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids[0]"),
        ({"bad_words": "no"}, "bad_words"),
        ({"bad_words": [5]}, "bad_words[0]"),
        ({"priority": 1.5}, "priority"),
        ({"max_queue_time": "1s"}, "max_queue_time"),
        ({"on_disconnect": "forget"}, "on_disconnect"),
    ],
)
async def test_the_shape_of_vllms_parameters_is_checked(
    http: httpx.AsyncClient, path: str, asked: dict[str, Any], param: str
) -> None:
    prompt = {"messages": HELLO} if "chat" in path else {"prompt": "a"}
    error = (await post(http, {**prompt, **asked}, path)).json()["error"]
    assert error["code"] == "FIELD_INVALID"
    # Of a type with several forms each is told.
    assert error["param"].startswith(param)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("beam_search.width", "best_of"),
        ("beam_search.length_penalty", "length_penalty"),
        ("sampling.bad_words", "bad_words"),
        ("max_queue_time", "max_queue_time"),
    ],
)
def test_the_cores_fields_have_vllms_names(field: str, param: str) -> None:
    assert errors.rename(invalid([Violation(field, "x")]), {}).violations[0].field == param


async def test_neutral_values_of_it_are_taken(http: httpx.AsyncClient) -> None:
    neutral = {
        "logprobs": None,
        "suffix": "",
        "best_of": 1,
        "use_beam_search": False,
        "length_penalty": 1.0,
        "early_stopping": False,
        "response_format": {"type": "text"},
    }
    assert (await post(http, {"prompt": "a", **neutral})).status_code == 200
    neutral = {
        "logprobs": False,
        "top_logprobs": 0,
        "tools": [],
        "tool_choice": "auto",
        "add_special_tokens": False,
        "thinking_token_budget": -1,
        "verbosity": "medium",
        "modalities": ["text"],
        "include_reasoning": True,
    }
    assert (await post(http, {"messages": HELLO, **neutral}, "/v1/chat/completions")).status_code == 200


async def test_what_only_labels_a_call_is_taken(http: httpx.AsyncClient) -> None:
    labels = {
        "store": True,
        "service_tier": "flex",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "x",
        "session_id": "s",
        "user": "u",
    }
    assert set(labels) | {"prompt_cache_options"} == ChatBody.WITHOUT_EFFECT
    assert (await post(http, {"messages": HELLO, **labels}, "/v1/chat/completions")).status_code == 200


async def test_null_is_nothing_asked(http: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(ChatBody.model_fields.keys() - {"messages"})
    assert (await post(http, {"messages": HELLO, **nothing}, "/v1/chat/completions")).status_code == 200
    nothing = dict.fromkeys(CompletionBody.model_fields.keys() - {"prompt"})
    assert (await post(http, {"prompt": "a", **nothing})).status_code == 200


async def test_a_name_of_a_chat_is_none_of_a_completion(http: httpx.AsyncClient) -> None:
    error = (await post(http, {"prompt": "a", "tools": [], "messages": HELLO})).json()["error"]
    assert {violation["param"] for violation in error["violations"]} == {"tools", "messages"}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        (CompletionBody, completion_create_params.CompletionCreateParamsStreaming),
        (ChatBody, chat_create_params.CompletionCreateParamsStreaming),
    ],
)
def test_every_parameter_of_the_openai_package_is_known(body: Any, params: Any) -> None:
    assert set(typing.get_type_hints(params)) <= set(body.model_fields)


# Those of vLLM 0.25 that OpenAI has not, and that have to do with text.
VLLM_BOTH = """
    add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params ignore_eos include_stop_str_in_output
    kv_transfer_params length_penalty logprob_token_ids min_p min_tokens priority prompt_logprobs repetition_detection
    repetition_penalty request_id response_format return_token_ids return_token_offsets return_tokens_as_token_ids
    session_id skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
    thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs watermarking
"""
VLLM_CHAT = """
    add_generation_prompt chat_template chat_template_kwargs continue_final_message documents echo include_reasoning
    media_io_kwargs mm_processor_kwargs reasoning_effort return_prompt_text
"""


def test_every_parameter_of_vllm_is_known() -> None:
    both = set(VLLM_BOTH.split())
    assert both | {"prompt_embeds"} <= CompletionBody.model_fields.keys()
    assert both | set(VLLM_CHAT.split()) <= ChatBody.model_fields.keys()


async def test_a_body_that_is_too_long_is_refused(http: httpx.AsyncClient) -> None:
    body = b'{"prompt": "' + b"a" * PUBLIC_MESSAGE_BYTES + b'"}'
    response = await post(http, body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "MESSAGE_TOO_LARGE"
    assert response.headers["x-should-retry"] == "false"


async def test_a_body_of_pieces_is_measured_too(http: httpx.AsyncClient) -> None:
    async def pieces() -> typing.AsyncIterator[bytes]:
        for _ in range(17):
            yield b"a" * 1024 * 1024

    response = await http.post("/v1/completions", content=pieces(), headers={"Content-Type": "application/json"})
    assert response.json()["error"]["code"] == "MESSAGE_TOO_LARGE"


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
