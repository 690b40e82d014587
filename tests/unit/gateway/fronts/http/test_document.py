"""The OpenAPI document of the gateway tells the truth of the Messages and the Responses API too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anthropic.types
import httpx
import jsonschema
import openai.types
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import TypeAdapter

from blockyard.errors import TABLE, BlockyardError, Reason
from gateway.fronts.http.server import make_http_app
from gateway.fronts.openai.app import make_app
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.unit.gateway.fronts.openai.scripted import ScriptedService, accepted, answer, calling, deltas
from tests.unit.gateway.fronts.openai.serving import serve_openai
from tests.unit.gateway.harness import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
INPUT_TOKENS = "/v1/responses/input_tokens"
OF_ONE, CANCEL = "/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"
INFERENCE_CALLS = ("", "/ready", "/infer", "/generate", "/generate_stream")
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOL: dict[str, Any] = {"name": "read", "description": "Reads.", "strict": False}
CALLS: list[tuple[str, dict[str, Any]]] = [
    (MESSAGES, {"model": "scripted", "max_tokens": 9, "messages": HELLO}),
    (MESSAGES, {"model": "scripted", "max_tokens": 30, "messages": HELLO, "thinking": {"type": "enabled"}}),
    (MESSAGES, {"model": "scripted", "max_tokens": 0, "messages": [], "top_p": 2, "other": 1}),
    (MESSAGES, {"model": "other", "max_tokens": 9, "messages": HELLO}),
    (RESPONSES, {"input": "Hi"}),
    (RESPONSES, {"input": HELLO, "max_output_tokens": 3, "include": ["message.output_text.logprobs"]}),
    (
        RESPONSES,
        {
            "input": "Hi",
            "tools": [
                {"type": "function", "parameters": {"type": "object"}, **TOOL},
                {
                    "type": "namespace",
                    "name": "disk",
                    "description": "",
                    "tools": [{"type": "function", **TOOL, "name": "list"}],
                },
            ],
            "client_metadata": {"thread_id": "a"},
            "tool_choice": {"type": "function", "name": "read"},
            "text": {
                "format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}},
                "verbosity": "medium",
            },
            "reasoning": {"effort": "low", "mode": "standard"},
            "metadata": {"a": "b"},
            "max_tool_calls": 3,
            "prompt_cache_options": {"mode": "implicit", "ttl": "30m"},
            "service_tier": "auto",
            "truncation": "disabled",
            "user": "me",
        },
    ),
    (RESPONSES, {"input": [], "temperature": -1, "store": True}),
]
TYPES: dict[str, Any] = {
    MESSAGES: anthropic.types.Message,
    COUNT: anthropic.types.MessageTokensCount,
    RESPONSES: Response,
    INPUT_TOKENS: InputTokenCountResponse,
    OF_ONE: Response,
    CANCEL: Response,
}
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return make_http_app(ScriptedService()).openapi()  # type: ignore[arg-type]


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
async def http(service: ScriptedService) -> AsyncIterator[httpx.AsyncClient]:
    async with serve_openai(service) as url, httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client:
        yield client


def check_response(document: dict[str, Any], method: str, path: str, response: httpx.Response) -> None:
    told = document["paths"][path][method]["responses"][str(response.status_code)]
    assert told["content"]["application/json"]["schema"] == {"type": "object"}
    if response.status_code == 200:
        TYPES[path].model_validate(response.json())
    elif path in (MESSAGES, COUNT):
        check_failure(response.json())
    else:
        openai.types.ErrorObject.model_validate(response.json()["error"])


def check_failure(answer: dict[str, Any]) -> None:
    """Checks an error of the Messages API: the client's types do not list all of its documented types."""
    assert answer["type"] == "error"
    assert all(isinstance(answer["error"][name], str) for name in ("type", "message"))


def check_stream(document: dict[str, Any], method: str, path: str, response: httpx.Response) -> set[str]:
    """Holds the events of a stream against the types of the API's client, and gives their types."""
    assert "text/event-stream" in document["paths"][path][method]["responses"]["200"]["content"]
    blocks = [block.split("\n", 1) for block in response.text.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    for event in events:
        if event["type"] == "response.failed":
            # OpenAI's type lists its own codes alone.
            event["response"]["error"]["code"] = "server_error"
        if path != MESSAGES:
            RESPONSE_EVENT.validate_python(event)
        elif event["type"] == "error":
            check_failure(event)
        elif event["type"] != "ping":
            MESSAGE_EVENT.validate_python(event)
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    return {event["type"] for event in events}


@pytest.mark.parametrize("script", [answer("Hello"), calling], ids=["text", "calls"])
@pytest.mark.parametrize(("path", "body"), CALLS, ids=str)
async def test_a_call_is_answered_as_it_says(
    http: httpx.AsyncClient, service: ScriptedService, document: dict[str, Any], script: Any, path: str, body: Any
) -> None:
    service.script = script
    whole = await http.post(path, json=body)
    check_response(document, "post", path, whole)
    if whole.status_code == 200:
        check_stream(document, "post", path, await http.post(path, json=body | {"stream": True}))


async def test_the_events_of_a_failure_are_told_of(
    http: httpx.AsyncClient, service: ScriptedService, document: dict[str, Any]
) -> None:
    service.script = lambda request: [accepted(request), *deltas("He"), BlockyardError(Reason.NO_READY_WORKER, "gone")]
    for (path, body), last in ((CALLS[0], "error"), (CALLS[4], "response.failed")):
        stream = await http.post(path, json=body | {"stream": True})
        assert last in check_stream(document, "post", path, stream)


@pytest.mark.parametrize("reason", Reason)
async def test_every_reason_is_told_of(
    http: httpx.AsyncClient, service: ScriptedService, document: dict[str, Any], reason: Reason
) -> None:
    service.script = lambda request: [BlockyardError(reason, "so it is", retry_after_seconds=1)]
    for path, body in (CALLS[0], CALLS[4]):
        response = await http.post(path, json=body)
        assert response.status_code == TABLE[reason].http_status
        check_response(document, "post", path, response)
        assert reason in document["paths"][path]["post"]["responses"][str(response.status_code)]["description"]


async def test_tokens_are_counted_as_it_says(http: httpx.AsyncClient, document: dict[str, Any]) -> None:
    tools = [{"input_schema": {"type": "object"}, **TOOL}]
    for body in ({"model": "scripted", "messages": HELLO, "tools": tools}, {"model": "scripted"}):
        check_response(document, "post", COUNT, await http.post(COUNT, json=body))
    response = await http.post(COUNT, content="Hi", headers={"content-type": "text/plain"})
    assert response.status_code == 415
    check_response(document, "post", COUNT, response)


async def test_the_tokens_of_an_input_are_counted_as_it_says(http: httpx.AsyncClient, document: dict[str, Any]) -> None:
    for body in ({"input": HELLO, "instructions": "Be kind."}, {"input": [], "previous_response_id": "resp_1"}, {}):
        check_response(document, "post", INPUT_TOKENS, await http.post(INPUT_TOKENS, json=body))


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}"])
def test_the_header_that_asks_for_models_in_anthropics_form_is_described(document: dict[str, Any], path: str) -> None:
    assert "anthropic-version" in [each["name"] for each in document["paths"][path]["get"]["parameters"]]


async def test_a_response_in_the_background_is_as_it_says(document: dict[str, Any]) -> None:
    async with (
        FakeScheduler() as scheduler,
        serving(scheduler) as front,
        serve_openai(front.service) as url,
        httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
    ):
        begun = await http.post(RESPONSES, json={"input": "Hi", "max_output_tokens": 9, "background": True})
        check_response(document, "post", RESPONSES, begun)
        path = f"{RESPONSES}/{begun.json()['id']}"
        stream = await http.get(path, params={"stream": "true"})
        assert "response.output_text.delta" in check_stream(document, "get", OF_ONE, stream)
        check_response(document, "get", OF_ONE, await http.get(path))
        check_response(document, "get", OF_ONE, await http.get(path, params={"starting_after": "a"}))
        check_response(document, "get", OF_ONE, await http.get(f"{RESPONSES}/resp_none"))
        check_response(document, "post", CANCEL, await http.post(f"{path}/cancel"))
        check_response(document, "post", CANCEL, await http.post(f"{RESPONSES}/resp_none/cancel"))


def test_it_holds_all_apis(document: dict[str, Any]) -> None:
    of_openai: dict[str, Any] = make_app(ScriptedService()).openapi()  # type: ignore[arg-type]
    added = document["paths"].keys() - of_openai["paths"].keys()
    assert {path for path in added if not path.startswith("/v2")} == {
        MESSAGES,
        COUNT,
        RESPONSES,
        INPUT_TOKENS,
        OF_ONE,
        CANCEL,
    }
    model = "/v2/models/{name}"
    assert {path for path in added if path.startswith("/v2")} == {
        *("/v2", "/v2/health/live", "/v2/health/ready"),
        *(f"{model}{version}{call}" for version in ("", "/versions/{version}") for call in INFERENCE_CALLS),
    }
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert "$defs" not in json.dumps(document)
    # Each reference leads somewhere, also where two APIs have shapes of one name.
    schemas = document["components"]["schemas"]
    names = {line.split('"')[0] for line in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert names <= schemas.keys()


def test_the_forms_of_tokenize_are_those_of_all_apis(document: dict[str, Any]) -> None:
    body = document["paths"]["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = [each["$ref"].rpartition("/")[2] for each in body["oneOf"]]
    assert names == ["TokenizeChatBody", "TokenizeInputBody", "TokenizeBody"]


def test_bodies_are_told_as_they_are_taken(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    for name, field in (("ResponseBody", "temperature"), ("MessagesBody", "temperature")):
        assert schemas[name]["additionalProperties"] is False
        assert schemas[name]["properties"][field]["anyOf"][0] == {"type": "number", "minimum": 0}
    assert schemas["ResponseBody"]["properties"]["max_output_tokens"]["anyOf"][0]["minimum"] == 1
    assert schemas["MessagesBody"]["properties"]["max_tokens"]["minimum"] == 1
    for path, body in CALLS:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        is_wrong = bool({"other", "store"} & body.keys())
        validator = jsonschema.Draft202012Validator({**schema, "components": document["components"]})
        assert validator.is_valid(body) is not is_wrong
