"""The OpenAPI document tells the truth about routes, bodies, ranges and errors; answers are of OpenAI's types."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import jsonschema
import pytest
from openai.types import Completion, ErrorObject, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from blockyard.errors import TABLE, BlockyardError, Reason
from gateway.fronts.openai.app import make_app
from gateway.fronts.openai.schema.requests import ChatBody, CompletionBody
from gateway.validation import MAX_N
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.openai.scripted import ScriptedService
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fastapi import FastAPI

HELLO: Any = [{"role": "user", "content": "Hi"}]
TOLD_ALL = {
    "n": 2,
    "seed": 1,
    "max_tokens": 3,
    "return_token_ids": True,
    "prompt_logprobs": 1,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
CALLS: list[dict[str, Any]] = [
    {"prompt": "a"},
    {"prompt": ["a", "b"], "logprobs": 2, **TOLD_ALL},
    {"prompt": "a", "echo": True, "max_tokens": 3},
    {"prompt": "a", "stop": "e", "use_beam_search": True, "n": 2, "max_tokens": 3},
    {"messages": HELLO, "max_tokens": 3},
    {"messages": HELLO, "logprobs": True, "top_logprobs": 2, **TOLD_ALL},
    {"messages": HELLO, "max_tokens": 3, "echo": True, "stop_token_ids": [7]},
    {"prompt": "a", "n": 0},
    {"messages": HELLO, "temperature": -1, "tools": 5},
]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TYPES: dict[str, Any] = {COMPLETIONS: Completion, CHATS: ChatCompletion, "/v1/models/demo": Model}
OTHERS: list[tuple[str, str, Any]] = [
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/tokenize", {"messages": HELLO, "return_token_strs": True}),
    ("POST", "/tokenize", {}),
    ("POST", "/detokenize", {"tokens": [1, 2]}),
    ("POST", "/detokenize", {"tokens": [-1]}),
    ("POST", "/v1/embeddings", {"input": ["a", "b"]}),
    ("POST", "/v1/embeddings", {"input": 5}),
    ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/v2/rerank", {"query": "a", "documents": []}),
    ("POST", "/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}),
    ("POST", "/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("POST", "/score", {"text_1": "a"}),
    ("POST", "/classify", {"input": "a"}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/demo", None),
    ("POST", "/v1/models/load", {"model": "demo"}),
    ("POST", "/v1/models/load", {"model": "other"}),
    ("POST", "/v1/models/load", {}),
    ("GET", "/v1/models/other", None),
    ("DELETE", "/v1/requests/mine", None),
    ("GET", "/v1/requests/nobodys/stream", None),
    ("GET", "/health", None),
    ("GET", "/health/ready", None),
    ("GET", "/health/live", None),
    ("GET", "/health/startup", None),
    ("GET", "/version", None),
]


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return make_app(ScriptedService()).openapi()  # type: ignore[arg-type]


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        FakeScheduler() as scheduler,
        serving(scheduler) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        yield http


def operation_of(document: dict[str, Any], method: str, path: str) -> dict[str, Any]:
    for template, name in (("/v1/models/{name}", "/v1/models/"), ("/v1/requests/{request_id}", "/v1/requests/")):
        if path.startswith(name) and path not in document["paths"]:
            path = template + ("/stream" if path.endswith("/stream") else "")
    return document["paths"][path][method.lower()]


def path_of(body: dict[str, Any]) -> str:
    return CHATS if "messages" in body else COMPLETIONS


def check_response(document: dict[str, Any], method: str, path: str, response: httpx.Response) -> None:
    told = operation_of(document, method, path)["responses"][str(response.status_code)]
    assert told["content"]["application/json"]["schema"] == {"type": "object"}
    answer = response.json()
    if response.status_code != 200:
        ErrorObject.model_validate(answer["error"])
    elif path in TYPES:
        TYPES[path].model_validate(answer)
    else:
        assert isinstance(answer, dict)


@pytest.mark.parametrize("body", CALLS, ids=str)
async def test_a_call_is_answered_as_it_says(
    http: httpx.AsyncClient, document: dict[str, Any], body: dict[str, Any]
) -> None:
    body = {name: value for name, value in body.items() if name != "stream_options"}
    check_response(document, "POST", path_of(body), await http.post(path_of(body), json=body))


@pytest.mark.parametrize("body", CALLS, ids=str)
async def test_a_stream_is_made_of_openais_chunks(
    http: httpx.AsyncClient, document: dict[str, Any], body: dict[str, Any]
) -> None:
    response = await http.post(path_of(body), json=body | {"stream": True})
    if response.status_code != 200:
        check_response(document, "POST", path_of(body), response)
        return
    assert "text/event-stream" in operation_of(document, "POST", path_of(body))["responses"]["200"]["content"]
    events = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert events.pop() == "[DONE]" and events
    for event in map(json.loads, events):
        if "messages" in body:
            ChatCompletionChunk.model_validate(event)
        else:
            # OpenAI has no type for the chunks of completions, whose reason is null before the end.
            choices = [each | {"finish_reason": each["finish_reason"] or "stop"} for each in event["choices"]]
            Completion.model_validate(event | {"choices": choices})


@pytest.mark.parametrize(("method", "path", "body"), OTHERS)
async def test_everything_else_is_answered_as_it_says(
    http: httpx.AsyncClient, document: dict[str, Any], method: str, path: str, body: Any
) -> None:
    check_response(document, method, path, await http.request(method, path, json=body))


def test_every_route_is_tried(document: dict[str, Any]) -> None:
    tried = [operation_of(document, method, path)["operationId"] for method, path, _ in OTHERS]
    tried += [operation_of(document, "POST", path_of(body))["operationId"] for body in CALLS]
    told = {operation["operationId"] for path in document["paths"].values() for operation in path.values()}
    assert told == set(tried)


def test_a_document_of_its_kind() -> None:
    app: FastAPI = make_app(ScriptedService())  # type: ignore[arg-type]
    document = app.openapi()
    assert document["openapi"].startswith("3.1")
    assert app.openapi() is document
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert "$defs" not in json.dumps(document)


@pytest.mark.parametrize("reason", Reason)
async def test_every_reason_is_told_of(
    service: ScriptedService, url: str, document: dict[str, Any], reason: Reason
) -> None:
    service.script = lambda request: [BlockyardError(reason, "so it is", retry_after_seconds=1)]
    async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http:
        response = await http.post("/v1/completions", json={"prompt": "a"})
    assert response.status_code == TABLE[reason].http_status
    check_response(document, "POST", "/v1/completions", response)
    told = operation_of(document, "POST", "/v1/completions")["responses"][str(response.status_code)]
    assert reason in told["description"]
    if response.status_code in (429, 503):
        assert told["headers"].keys() == {"Retry-After"}


def test_nothing_is_told_of_fastapis_own_errors(document: dict[str, Any]) -> None:
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]
            places = [(told["in"], told["name"]) for told in operation.get("parameters", ())]
            assert len(places) == len(set(places))


def test_bodies_allow_nothing_else(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for path, name in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert body == {"$ref": f"#/components/schemas/{name}"}
        assert schemas[name]["additionalProperties"] is False
    assert schemas["ChatBody"]["properties"]["chat_template"]["enum"] == [None]
    assert document["paths"]["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"] == {
        "oneOf": [{"$ref": f"#/components/schemas/Tokenize{form}Body"} for form in ("Chat", "")]
    }


@pytest.mark.parametrize(
    ("body", "name", "bounds"),
    [
        (CompletionBody, "n", {"minimum": 1, "maximum": MAX_N}),
        (CompletionBody, "top_p", {"exclusiveMinimum": 0, "maximum": 1}),
        (CompletionBody, "top_k", {"minimum": -1, "maximum": 2**32 - 1}),
        (CompletionBody, "temperature", {"minimum": 0}),
        (CompletionBody, "logprobs", {"minimum": 0, "maximum": 20}),
        (CompletionBody, "length_penalty", {}),
        (ChatBody, "top_logprobs", {"minimum": 0, "maximum": 20}),
        # The width of a beam search has a range; without one it is n.
        (ChatBody, "best_of", {}),
    ],
)
def test_ranges_are_those_of_the_core(document: dict[str, Any], body: Any, name: str, bounds: dict[str, Any]) -> None:
    told, null = document["components"]["schemas"][body.__name__]["properties"][name]["anyOf"]
    assert null == {"type": "null"}
    assert {key: value for key, value in told.items() if key != "type"} == bounds
