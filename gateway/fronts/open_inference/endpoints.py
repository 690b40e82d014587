"""Serves the Open Inference Protocol over HTTP: KServe's calls, and Triton's extension for generation."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRouter
from starlette.exceptions import HTTPException

from blockyard.errors import BlockyardError, Reason, Violation, invalid
from gateway.fronts.http_calls.bodies import parse_body, read_json, read_tenant
from gateway.fronts.http_calls.errors import client_error
from gateway.fronts.http_calls.openapi import ALWAYS, EVENTS, TENANT, ApiBodies, documented
from gateway.fronts.http_calls.routes import AnsweringRoute
from gateway.fronts.http_calls.streaming import Connection, EventStream, ServerSentEvent, read_body
from gateway.fronts.open_inference import errors
from gateway.fronts.open_inference.answer import started
from gateway.fronts.open_inference.bodies import (
    HEADER_LENGTH,
    GenerateBody,
    InferBody,
    decode_generate,
    decode_infer,
    encode_generate,
    encode_infer,
    split_body,
)
from gateway.fronts.open_inference.call import INPUTS, understand
from gateway.fronts.open_inference.metadata import check_model, model_metadata, server_metadata
from gateway.fronts.openai.schema.requests import MAX_PROMPTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from gateway.fronts.open_inference.call import InferCall
    from gateway.fronts.open_inference.tensors import InferRequest, InferResponse
    from gateway.generation import GenerationService


BODIES = ApiBodies((InferBody, GenerateBody))
PATH = "/v2"
_MODEL = PATH + "/models/{name:path}"
_VERSION = _MODEL + "/versions/{version}"
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]
_NAMED = (*ALWAYS, Reason.MODEL_NOT_FOUND)
_PAGES = "https://kserve.github.io/website/docs/concepts/architecture/data-plane/v2-protocol"
_GENERATE = "https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md"

SERVER = documented(f"the [server's metadata]({_PAGES})", ALWAYS)
LIVE = documented("the process works", ())
READY = documented("requests can be served now", (Reason.NO_READY_WORKER,))
MODEL = documented(f"the [model's metadata]({_PAGES})", _NAMED)
MODEL_READY = documented("requests for the model can be served now", (*_NAMED, Reason.NO_READY_WORKER))
INFER = documented(f"the [response]({_PAGES}) with its tensors", Reason, bodies=(InferBody,), parameters=(TENANT,))
GENERATE = documented(f"Triton's [response]({_GENERATE})", Reason, bodies=(GenerateBody,), parameters=(TENANT,))
STREAM = documented(
    f"Triton's [responses]({_GENERATE})", Reason, bodies=(GenerateBody,), parameters=(TENANT,), forms=(EVENTS,)
)


def is_path(path: str) -> bool:
    """Returns whether an HTTP path is one of the protocol's, which shares its first part with other APIs."""
    return path == PATH or path.startswith((f"{PATH}/health", f"{PATH}/models", f"{PATH}/repository"))


class InferenceRoute(AnsweringRoute):
    """A route that answers errors in the protocol's form."""

    @staticmethod
    def answer_error(error: Exception) -> Response:
        """Makes the answer."""
        if isinstance(error, HTTPException):
            return errors.response(str(error.detail), error.status_code, error.headers or {})
        return errors.error_response(client_error(error))


class InferenceEndpoints:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def server(self) -> JSONResponse:
        """Returns the server's name, its version and the extensions that it supports."""
        return JSONResponse(server_metadata("parameters", "binary_tensor_data", "generate"))

    async def live(self) -> JSONResponse:
        """Answers 200 as long as the process works."""
        return JSONResponse({"live": True})

    async def ready(self) -> Response:
        """Answers 200 if requests can be served now, else 503 with the cause."""
        if self._generation.is_ready():
            return JSONResponse({"ready": True})
        return errors.not_ready_response(self._not_ready())

    async def model_ready(self, name: str, version: str = "") -> Response:
        """Answers 200 if requests for a model can be served now, else 503 with the cause, or 404."""
        check_model(self._generation, name, version)
        if self._generation.is_ready(self._generation.model_of(name)):
            return JSONResponse({"name": name, "ready": True})
        return errors.not_ready_response(self._not_ready())

    def _not_ready(self) -> BlockyardError:
        message = self._generation.readiness_message
        return BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=1.0)

    async def model(self, name: str, version: str = "") -> JSONResponse:
        """Returns a model's versions and tensors."""
        return JSONResponse(model_metadata(self._generation, name, version))

    async def infer(self, request: Request, name: str, version: str = "") -> Response:
        """Answers prompts, which are elements of a tensor."""
        tenant, length = read_tenant(request), request.headers.get(HEADER_LENGTH)
        # Web pages of other origins cannot send the header without a preflight request: the type may then be any.
        raw, binary = split_body(await (read_json(request) if length is None else read_body(request)), length)
        body = parse_body(InferBody, raw)
        decoded = decode_infer(body, binary, INPUTS, max_elements=MAX_PROMPTS, model_name=name, version=version)
        call = _understand_whole(decoded, "infer").of_caller(tenant, None)
        content, json_length = encode_infer(await self._whole(request, call), body)
        headers = {"x-request-id": call.call.call_id}
        if json_length is None:
            return Response(content, headers=headers, media_type="application/json")
        headers[HEADER_LENGTH] = str(json_length)
        return Response(content, headers=headers, media_type="application/octet-stream")

    async def generate(self, request: Request, name: str, version: str = "") -> Response:
        """Answers a prompt as a whole."""
        tenant, decoded = read_tenant(request), await _read_generate(request, name, version, stream=False)
        call = _understand_whole(decoded, "generate").of_caller(tenant, None)
        content = encode_generate(await self._whole(request, call))
        return Response(content, headers={"x-request-id": call.call.call_id}, media_type="application/json")

    async def generate_stream(self, request: Request, name: str, version: str = "") -> Response:
        """Answers a prompt as a stream of events: as its tokens come, or as a whole if `stream` is false."""
        tenant, decoded = read_tenant(request), await _read_generate(request, name, version, stream=True)
        call = understand(decoded).of_caller(tenant, None)
        async with AsyncExitStack() as resources:
            connection = Connection(request.receive)
            resources.push_async_callback(connection.aclose)
            responses = await connection.run(resources.enter_async_context(started(self._generation, call)))
            headers = {"x-request-id": call.call.call_id}
            return EventStream(_events(responses), connection, resources.pop_all(), headers)

    async def _whole(self, request: Request, call: InferCall) -> InferResponse:
        async with AsyncExitStack() as resources:
            connection = Connection(request.receive)
            resources.push_async_callback(connection.aclose)
            return await connection.run(self._answer(call))

    async def _answer(self, call: InferCall) -> InferResponse:
        async with started(self._generation, call) as responses:
            return await anext(responses)


async def _read_generate(request: Request, name: str, version: str, *, stream: bool) -> InferRequest:
    body = parse_body(GenerateBody, await read_json(request))
    return decode_generate(body, stream=stream, model_name=name, version=version)


def _understand_whole(decoded: InferRequest, path: str) -> InferCall:
    """Makes the call of a request whose answer is not streamed; `path`: the last part of the call's path."""
    call = understand(decoded)
    if call.stream:
        raise invalid([Violation("stream", f"must be false for {path}; generate_stream streams")])
    return call


async def _events(responses: AsyncGenerator[InferResponse, None]) -> AsyncGenerator[ServerSentEvent, None]:
    """Makes the events of a stream. A stream that fails ends with an event that has the error."""
    try:
        async for response in responses:
            yield ServerSentEvent(encode_generate(response))
    except Exception as error:  # noqa: BLE001 - the boundary of what fails after the status line
        yield ServerSentEvent(errors.encode_error(client_error(error)))


async def _not_served(request: Request) -> Response:
    """Refuses the calls of Triton and KServe that are not supported; the error names them."""
    raise HTTPException(404, f"{request.method} {request.url.path} is not served")


def add_open_inference(app: FastAPI, generation: GenerationService) -> None:
    endpoints = InferenceEndpoints(generation)
    router = APIRouter(route_class=InferenceRoute)

    def add(path: str, endpoint: Any, method: str, document: dict[str, Any]) -> None:
        router.add_api_route(path, endpoint, methods=[method], **document)

    add(PATH, endpoints.server, "GET", SERVER)
    add(f"{PATH}/health/live", endpoints.live, "GET", LIVE)
    add(f"{PATH}/health/ready", endpoints.ready, "GET", READY)
    for model in (_VERSION, _MODEL):
        add(f"{model}/ready", endpoints.model_ready, "GET", MODEL_READY)
        add(f"{model}/infer", endpoints.infer, "POST", INFER)
        add(f"{model}/generate", endpoints.generate, "POST", GENERATE)
        add(f"{model}/generate_stream", endpoints.generate_stream, "POST", STREAM)
    for model in (_VERSION, _MODEL):
        add(model, endpoints.model, "GET", MODEL)
    for rest in ("models", "repository"):
        router.add_api_route(f"{PATH}/{rest}/{{rest:path}}", _not_served, methods=_METHODS, include_in_schema=False)
    app.include_router(router)
