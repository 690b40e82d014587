"""The OpenAI HTTP API as a FastAPI application on the gateway's core.

Owns routes and the order of a call: read the body, understand it, start it, answer it. Every error leaves through one
place, in OpenAI's form.
"""

from __future__ import annotations

import json
import time
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import pydantic
from fastapi import FastAPI, Request, Response
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from blockyard import __version__
from blockyard.errors import BlockyardError, Reason, Violation, invalid
from blockyard.telemetry import EventLogger
from gateway.openai import errors, state
from gateway.openai.answer import ChunkedAnswer, WholeAnswer
from gateway.openai.call import understand_chat, understand_completion
from gateway.openai.headers import read_key, read_tenant
from gateway.openai.places import Places, Told, parse
from gateway.openai.running import Running
from gateway.openai.schema import MAX_PROMPTS, ChatBody, CompletionBody, GenerationBody
from gateway.openai.streaming import Connection, EventStream, ServerSentEvent, read_body

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine

    from gateway.generation import GenerationService, ModelCard
    from gateway.openai.call import Call
    from gateway.tokenizer import Tokenizer

log = EventLogger(__name__)
B = TypeVar("B", bound=GenerationBody)
JSON = "application/json"


def make_app(generation: GenerationService) -> FastAPI:
    """Makes the application. It is ready when the core is; it starts and stops nothing by itself."""
    app = FastAPI(title="Blockyard", version=__version__, summary="The OpenAI API on Blockyard's gateway")
    front = _Front(generation)
    _add_call(app, "/v1/completions", front.complete, CompletionBody)
    _add_call(app, "/v1/chat/completions", front.chat, ChatBody)
    app.add_api_route("/v1/requests/{request_id}/stream", front.resume, methods=["GET"])
    app.add_api_route("/v1/requests/{request_id}", front.cancel, methods=["DELETE"])
    app.add_api_route("/v1/models", front.list_models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", front.get_model, methods=["GET"])
    app.add_api_route("/health", front.health, methods=["GET"])
    app.add_api_route("/version", front.version, methods=["GET"])
    app.add_exception_handler(HTTPException, _answer_http_exception)
    _document(app)
    return app


class _Front:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self._created = int(time.time())

    async def complete(self, request: Request) -> Response:
        """Continues prompts: OpenAI's completions."""
        return await self._answer(request, CompletionBody, understand_completion)

    async def chat(self, request: Request) -> Response:
        """Answers a chat: OpenAI's chat completions."""
        return await self._answer(request, ChatBody, understand_chat)

    async def _answer(self, request: Request, kind: type[B], understand: Callable[[B, Tokenizer], Call]) -> Response:
        try:
            tenant, key = read_tenant(request), read_key(request)
            body = _named(_parse(kind, await read_body(request)), key)
            self._generation.resolve_model(body.model or "")
            call = understand(body, self._generation.tokenizer)
            keeps = key is not None and body.on_disconnect is None
            call = state.completed(call, tenant=tenant, keeps=keeps, created=int(time.time()))
            return await self._run(request, lambda running: running.start(call), Told())
        except Exception as error:  # noqa: BLE001 - the boundary of this front
            return errors.error_response(_known(error))

    async def resume(self, request: Request, request_id: str) -> Response:
        """Streams the answer of a call again, behind the event that Last-Event-ID names."""
        try:
            tenant = read_tenant(request)
            told = parse(request.headers.get("last-event-id", ""))
            return await self._run(request, lambda running: running.resume(request_id, tenant, told), told)
        except Exception as error:  # noqa: BLE001 - the boundary of this front
            return errors.error_response(_known(error))

    async def cancel(self, request: Request, request_id: str) -> Response:
        """Cancels a call, all of its requests, wherever they run."""
        try:
            tenant = read_tenant(request)
            cancelled = await self._generation.cancel([request_id], tenant=tenant)
            if not cancelled:
                several = (f"{request_id}-{number}" for number in range(MAX_PROMPTS))
                cancelled = await self._generation.cancel(several, tenant=tenant)
            return _json({"id": request_id, "cancelled": bool(cancelled)})
        except Exception as error:  # noqa: BLE001 - the boundary of this front
            return errors.error_response(_known(error))

    async def _run(
        self, request: Request, begin: Callable[[Running], Coroutine[Any, Any, None]], told: Told
    ) -> Response:
        async with AsyncExitStack() as resources:
            connection = Connection(request.receive)
            resources.push_async_callback(connection.aclose)
            running = Running(self._generation)
            resources.push_async_callback(running.aclose)
            await connection.run(begin(running))
            headers = {"x-request-id": running.call.call_id}
            if running.call.stream:
                events = self._chunks(running, Places(running.call, told), told)
                return EventStream(events, connection, resources.pop_all(), headers)
            return Response(await connection.run(self._whole(running)), headers=headers, media_type=JSON)

    async def _whole(self, running: Running) -> bytes:
        running.be_patient()
        answer = WholeAnswer(running.call, running.accepted, running.created)
        async with aclosing(running.events()) as events:
            async for prompt, event in events:
                answer.add(prompt, event)
        return answer.encode()

    async def _chunks(self, running: Running, places: Places, told: Told) -> AsyncGenerator[ServerSentEvent, None]:
        """Makes the events of a stream. One that fails ends with its error, and without [DONE].

        What the client has already goes through the answer too, which counts by it, and is not told again.
        """
        cards = self._generation.models()
        fingerprint = cards[0].determinism_id if cards else ""
        answer = ChunkedAnswer(running.call, running.accepted, running.created, fingerprint)
        try:
            if not told.has_begun:
                for chunk in answer.openings():
                    # Before the first token there is nothing behind which to go on.
                    yield ServerSentEvent(chunk)
            async with aclosing(running.events()) as events:
                async for prompt, event in events:
                    is_new, chunk = places.take(prompt, event), answer.add(prompt, event)
                    if is_new and chunk is not None:
                        yield ServerSentEvent(chunk, places.id())
        except Exception as error:  # noqa: BLE001 - the boundary of what fails after the status line
            yield ServerSentEvent(json.dumps({"error": errors.error_object(_known(error))}))
            return
        if not told.usage and (chunk := answer.usage()) is not None:
            yield ServerSentEvent(chunk, places.id(usage=True))
        yield ServerSentEvent("[DONE]")

    async def list_models(self) -> dict[str, Any]:
        """Lists the model that is served."""
        return {"object": "list", "data": [self._model(card) for card in self._generation.models()]}

    async def get_model(self, name: str) -> Response:
        """Tells about one model."""
        for card in self._generation.models():
            if card.name == name:
                return _json(self._model(card))
        return errors.error_response(BlockyardError(Reason.MODEL_NOT_FOUND, f"the model {name!r} is not served here"))

    def _model(self, card: ModelCard) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "blockyard",
            "max_model_len": card.max_model_len,
        }

    async def health(self) -> Response:
        """Answers 200 when requests can be served now, else 503 and why not."""
        if self._generation.is_ready():
            return _json({"status": "ok"})
        error = BlockyardError(Reason.NO_READY_WORKER, self._generation.readiness_message, retry_after_seconds=1.0)
        return errors.error_response(error)

    async def version(self) -> dict[str, str]:
        """Tells the version."""
        return {"version": __version__}


def _json(content: dict[str, Any]) -> Response:
    return Response(json.dumps(content), media_type=JSON)


def _parse(kind: type[B], raw: bytes) -> B:
    try:
        return kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        raise errors.from_validation(error) from None


def _named(body: B, key: str | None) -> B:
    """Calls a request by its Idempotency-Key."""
    if key is None:
        return body
    if body.request_id not in (None, key):
        raise invalid([Violation("request_id", f"is not {key!r}, which the header Idempotency-Key says")])
    return body.model_copy(update={"request_id": key})


def _known(error: Exception) -> BlockyardError:
    if isinstance(error, BlockyardError):
        return error
    log.exception("a call failed")
    return BlockyardError(Reason.BUG, "internal error; the server's log has more")


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answers what no route takes (404, 405), in OpenAI's form too."""
    assert isinstance(error, HTTPException)
    told = {
        "message": f"{error.detail}: {request.method} {request.url.path}",
        "type": "invalid_request_error",
        "param": None,
        "code": "unknown_url" if error.status_code == 404 else None,
    }
    return Response(json.dumps({"error": told}), error.status_code, error.headers, media_type=JSON)


def _add_call(app: FastAPI, path: str, endpoint: Callable[[Request], Any], body: type[GenerationBody]) -> None:
    """Adds a POST route that reads its body by itself, and documents it."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    app.add_api_route(
        path,
        endpoint,
        methods=["POST"],
        openapi_extra={"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}},
    )


def _document(app: FastAPI) -> None:
    """Puts the bodies' schemas into the OpenAPI document."""
    make_document = app.openapi

    def openapi() -> dict[str, Any]:
        document = make_document()
        _, schemas = models_json_schema(
            [(CompletionBody, "validation"), (ChatBody, "validation")], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi
