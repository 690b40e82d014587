"""Makes the OpenAI HTTP API as a FastAPI application: maps its routes to endpoints, and their errors to answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from blockyard.errors import BlockyardError, Reason
from blockyard.version import __version__
from gateway.fronts.http_calls.bodies import of_details, parse_body, read_json
from gateway.fronts.http_calls.errors import client_error
from gateway.fronts.http_calls.routes import AnsweringRoute
from gateway.fronts.openai import errors
from gateway.fronts.openai.endpoints import CallEndpoints
from gateway.fronts.openai.pooling.endpoints import PoolingEndpoints
from gateway.fronts.openai.schema import document
from gateway.fronts.openai.schema.requests import LoadBody
from gateway.fronts.openai.tokenization import Tokenization

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.models import Model
    from gateway.fronts.openai.tokenization import TokenForm
    from gateway.generation import GenerationService


_OK = {"status": "ok"}


class Service:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self._created = int(generation.clock.time())

    async def list_models(self) -> JSONResponse:
        """Lists the served model and its adapters."""
        models = [self._model(card) for card in self._generation.models()]
        return JSONResponse({"object": "list", "data": models})

    async def get_model(self, name: str) -> JSONResponse:
        """Returns one model."""
        return JSONResponse(self._model(self._generation.find_model(name)))

    async def load_model(self, request: Request) -> JSONResponse:
        """Loads a model that is loaded on demand, and answers when it is loaded."""
        body = parse_body(LoadBody, await read_json(request))
        return JSONResponse(self._model(await self._generation.load(body.model)))

    def _model(self, card: Model) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "blockyard",
            "parent": card.parent or None,
            "max_model_len": card.max_model_len or None,
            "has_chat_template": card.has_chat_template,
        }

    async def ready(self) -> JSONResponse:
        """Answers 200 if requests can be served now, else 503 with the cause."""
        if self._generation.is_ready():
            return JSONResponse(_OK)
        raise BlockyardError(Reason.NO_READY_WORKER, self._generation.readiness_message, retry_after_seconds=1.0)

    async def live(self) -> JSONResponse:
        """Answers 200 as long as the process works. A supervisor restarts the process if it gets no answer."""
        return JSONResponse(_OK)

    async def startup(self) -> JSONResponse:
        """Answers 200 as soon as the process has read its model's files; scheduler and workers may start later."""
        return JSONResponse(_OK)

    async def version(self) -> JSONResponse:
        """Returns the version."""
        return JSONResponse({"version": __version__})


_CODES = {404: "unknown_url", 405: "method_not_allowed", 415: "unsupported_media_type"}


class OpenAIRoute(AnsweringRoute):
    """A route that answers errors in OpenAI's form."""

    @staticmethod
    def answer_error(error: Exception) -> Response:
        """Makes the answer; raises HTTPException and RequestValidationError for the application's handlers."""
        if isinstance(error, HTTPException | RequestValidationError):
            raise error
        return errors.error_response(client_error(error))


def set_boundary(app: FastAPI) -> None:
    """Makes unknown paths, and all routes that are added after this call, answer errors in OpenAI's form."""
    app.router.route_class = OpenAIRoute
    app.add_exception_handler(HTTPException, _answer_http_exception)
    app.add_exception_handler(RequestValidationError, _answer_wrong_parameters)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method, or a body of another type."""
    assert isinstance(error, HTTPException)
    fields = {
        "message": f"{error.detail}: {request.method} {request.url.path}",
        "type": "invalid_request_error",
        "param": None,
        "code": _CODES.get(error.status_code),
    }
    return errors.response(fields, error.status_code, error.headers or {})


async def _answer_wrong_parameters(_request: Request, error: Exception) -> Response:
    """Answers wrong parameters of a path or query, which FastAPI itself would answer with 422."""
    assert isinstance(error, RequestValidationError)
    return errors.error_response(of_details(error.errors(), skip=1))


def make_app(generation: GenerationService, token_forms: Sequence[TokenForm] = ()) -> FastAPI:
    """Makes the application. Its readiness is that of `generation`; it starts and stops nothing itself.

    `token_forms`: forms of bodies that /tokenize takes from other APIs.
    """
    app = FastAPI(
        title="Blockyard",
        version=__version__,
        summary="The OpenAI API on Blockyard's gateway",
        # FastAPI's pages load scripts from other servers; the gateway's own page at / does not.
        docs_url=None,
        redoc_url=None,
    )
    set_boundary(app)
    _add_calls(app, CallEndpoints(generation))
    _add_pooling(app, PoolingEndpoints(generation))
    _add_tokenization(app, Tokenization(generation, token_forms))
    _add_service(app, Service(generation))
    document.describe(app)
    return app


def _add_calls(app: FastAPI, calls: CallEndpoints) -> None:
    app.add_api_route("/v1/completions", calls.complete, methods=["POST"], **document.COMPLETIONS)
    app.add_api_route("/v1/chat/completions", calls.chat, methods=["POST"], **document.CHATS)
    app.add_api_route("/v1/requests/{request_id}/stream", calls.resume, methods=["GET"], **document.RESUME)
    app.add_api_route("/v1/requests/{request_id}", calls.cancel, methods=["DELETE"], **document.CANCEL)


def _add_pooling(app: FastAPI, pooling: PoolingEndpoints) -> None:
    app.add_api_route("/v1/embeddings", pooling.embed, methods=["POST"], **document.EMBEDDINGS)
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        app.add_api_route(path, pooling.rerank, methods=["POST"], **document.RERANK)
    for path in ("/v1/score", "/score"):
        app.add_api_route(path, pooling.score, methods=["POST"], **document.SCORE)
    app.add_api_route("/classify", pooling.classify, methods=["POST"], **document.CLASSIFY)


def _add_tokenization(app: FastAPI, tokenization: Tokenization) -> None:
    described = document.describe_tokenize(form.body for form in tokenization.forms)
    app.add_api_route("/tokenize", tokenization.tokenize, methods=["POST"], **described)
    app.add_api_route("/detokenize", tokenization.detokenize, methods=["POST"], **document.DETOKENIZE)


def _add_service(app: FastAPI, service: Service) -> None:
    app.add_api_route("/v1/models", service.list_models, methods=["GET"], **document.MODELS)
    app.add_api_route("/v1/models/load", service.load_model, methods=["POST"], **document.LOAD)
    app.add_api_route("/v1/models/{name:path}", service.get_model, methods=["GET"], **document.MODEL)
    app.add_api_route("/health", service.ready, methods=["GET"], **document.READY)
    app.add_api_route("/health/ready", service.ready, methods=["GET"], **document.READY)
    app.add_api_route("/health/live", service.live, methods=["GET"], **document.ALIVE)
    app.add_api_route("/health/startup", service.startup, methods=["GET"], **document.ALIVE)
    app.add_api_route("/version", service.version, methods=["GET"], **document.VERSION)
