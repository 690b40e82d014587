"""Serves the Anthropic Messages API. Owns the order of a call: read the body, start the request, answer."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRouter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.routing import Match

from blockyard.errors import BlockyardError, Reason
from gateway.fronts.anthropic import errors
from gateway.fronts.anthropic.answer import MessageAnswer
from gateway.fronts.anthropic.call import placed_messages, understand, understand_count
from gateway.fronts.anthropic.schema import CountBody, MessagesBody, TokenizeMessagesBody
from gateway.fronts.http_calls.bodies import ANTHROPIC_VERSION, parse_body, read_json, read_tenant
from gateway.fronts.http_calls.errors import client_error, naming_places
from gateway.fronts.http_calls.loading import answer_stream
from gateway.fronts.http_calls.openapi import EVENTS, JSON, TENANT, ApiBodies, documented
from gateway.fronts.http_calls.routes import AnsweringRoute
from gateway.fronts.http_calls.single_reader import read_all, started, typed, typed_events
from gateway.fronts.http_calls.streaming import Connection, EventStream
from gateway.fronts.openai.tokenization import TokenForm, tokenize

if TYPE_CHECKING:
    from starlette.types import Scope

    from blockyard.contract.models import Model
    from gateway.fronts.anthropic.call import MessageCall
    from gateway.generation import GenerationService


_PAGES = "https://docs.anthropic.com/en/api"

BODIES = ApiBodies((MessagesBody, CountBody), {MessagesBody: {}})

MESSAGES = documented(
    f"Anthropic's [message]({_PAGES}/messages), or its events; the name of an event is the type in its data",
    Reason,
    bodies=(MessagesBody,),
    parameters=(TENANT,),
    forms=(JSON, EVENTS),
)

COUNT_TOKENS = documented(
    f"Anthropic's [count of tokens]({_PAGES}/messages-count-tokens)", Reason, bodies=(CountBody,), parameters=(TENANT,)
)

PATH = "/v1/messages"

_COUNT_PATH = f"{PATH}/count_tokens"

_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


class MessagesRoute(AnsweringRoute):
    """A route that answers errors in Anthropic's form."""

    @staticmethod
    def answer_error(error: Exception) -> Response:
        """Makes the answer."""
        if isinstance(error, HTTPException):
            fields = {"type": errors.error_type(error.status_code), "message": str(error.detail)}
            return errors.response({"type": "error", "error": fields}, error.status_code, error.headers or {})
        return errors.error_response(errors.rename(client_error(error)))


class MessageEndpoints:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation

    async def create(self, request: Request) -> Response:
        """Answers a conversation: Anthropic's messages."""
        tenant = read_tenant(request)
        body = parse_body(MessagesBody, await read_json(request))
        self._generation.resolve_model(body.model)
        answering = self._answer(request, body, understand(body, tenant, self._generation.clock))
        if not body.stream:
            return await answering
        return await answer_stream(self._generation, body.model, answering, lambda error: map(typed, _fail(error)))

    async def _answer(self, request: Request, body: MessagesBody, call: MessageCall) -> Response:
        async with AsyncExitStack() as resources:
            connection = Connection(request.receive)
            resources.push_async_callback(connection.aclose)
            starting = resources.enter_async_context(started(self._generation, call.request, clamps=True))
            with naming_places(lambda: placed_messages(body)):
                reader, accepted = await connection.run(starting)
            answer = MessageAnswer(call, accepted)
            headers = {"request-id": accepted.request_id}
            if call.stream:
                events = typed_events(answer, reader, _fail)
                return EventStream(events, connection, resources.pop_all(), headers)
            await connection.run(read_all(answer, reader))
            return Response(answer.encode(), headers=headers, media_type="application/json")

    async def count_tokens(self, request: Request) -> JSONResponse:
        """Counts the tokens of a conversation as a prompt."""
        tenant = read_tenant(request)
        body = parse_body(CountBody, await read_json(request))
        self._generation.resolve_model(body.model)
        with naming_places(lambda: placed_messages(body)):
            token_ids = await self._generation.prompt_of(understand_count(body, tenant))
        return JSONResponse({"input_tokens": len(token_ids)})

    async def tokenize(self, request: Request) -> Response:
        """Turns the prompt of a conversation into token ids."""
        return await tokenize(self._generation, await read_json(request), read_tenant(request), _MESSAGES_FORM)


# Calls of /tokenize with a body of this API.
_MESSAGES_FORM = TokenForm(
    "messages",
    TokenizeMessagesBody,
    lambda body: understand_count(body, ""),
    lambda body: naming_places(lambda: placed_messages(body)),
)


def _fail(error: BlockyardError) -> list[dict[str, Any]]:
    return [errors.error_object(errors.rename(error))]


async def _not_served(request: Request) -> Response:
    """Refuses the API's unsupported methods and paths; the error names them."""
    path = request.url.path
    if path in (PATH, _COUNT_PATH):
        raise HTTPException(405, f"{request.method} {path} is not supported: POST is", {"Allow": "POST"})
    raise HTTPException(404, f"{path} is not supported: {PATH} and {_COUNT_PATH} are")


async def _alive() -> Response:
    """Answers 200: agents check that the server responds before they send a call."""
    return Response()


def add_messages(app: FastAPI, generation: GenerationService) -> None:
    endpoints = MessageEndpoints(generation)
    router = APIRouter(route_class=MessagesRoute)
    router.add_api_route(PATH, endpoints.create, methods=["POST"], **MESSAGES)
    router.add_api_route(_COUNT_PATH, endpoints.count_tokens, methods=["POST"], **COUNT_TOKENS)
    for path in (PATH, PATH + "/{rest:path}"):
        router.add_api_route(path, _not_served, methods=_METHODS, include_in_schema=False)
    app.include_router(router)
    tokenize_route = VersionedRoute("/tokenize", endpoints.tokenize, methods=["POST"], include_in_schema=False)
    app.router.routes.insert(0, tokenize_route)
    app.add_api_route("/", _alive, methods=["HEAD"], include_in_schema=False)


_PATH = "/v1/models"


class VersionedRoute(MessagesRoute):
    """A route for calls with the header that all Anthropic clients send. Other calls match the path's next route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if ANTHROPIC_VERSION in Headers(scope=scope) else (Match.NONE, {})


class ModelEndpoints:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self._created_at = f"{datetime.fromtimestamp(generation.clock.time(), UTC):%Y-%m-%dT%H:%M:%SZ}"

    async def list_models(self) -> JSONResponse:
        """Lists all served models on one page."""
        models = [self._model(card) for card in self._generation.models()]
        first, last = (models[0]["id"], models[-1]["id"]) if models else (None, None)
        return JSONResponse({"data": models, "has_more": False, "first_id": first, "last_id": last})

    async def get_model(self, name: str) -> JSONResponse:
        """Returns one model."""
        return JSONResponse(self._model(self._generation.find_model(name)))

    def _model(self, card: Model) -> dict[str, Any]:
        return {
            "type": "model",
            "id": card.name,
            "display_name": card.name,
            "created_at": self._created_at,
            "max_input_tokens": card.max_model_len or None,
        }


def add_models(app: FastAPI, generation: GenerationService) -> None:
    """Adds the routes to an application, before its routes of the same paths that require no header."""
    endpoints = ModelEndpoints(generation)
    app.router.routes[:0] = [
        VersionedRoute(_PATH, endpoints.list_models, methods=["GET"], include_in_schema=False),
        VersionedRoute(_PATH + "/{name:path}", endpoints.get_model, methods=["GET"], include_in_schema=False),
    ]
