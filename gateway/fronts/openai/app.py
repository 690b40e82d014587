"""Makes the OpenAI HTTP API as a FastAPI application, and maps its routes to endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from blockyard.version import __version__
from gateway.fronts.openai.endpoints import CallEndpoints
from gateway.fronts.openai.error_boundary import set_boundary
from gateway.fronts.openai.pooling.endpoints import PoolingEndpoints
from gateway.fronts.openai.schema import document
from gateway.fronts.openai.service import Service
from gateway.fronts.openai.tokenization import Tokenization

if TYPE_CHECKING:
    from gateway.generation import GenerationService


def make_app(generation: GenerationService) -> FastAPI:
    """Makes the application. Its readiness is that of `generation`; it starts and stops nothing itself."""
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
    _add_tokenization(app, Tokenization(generation))
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
    app.add_api_route("/tokenize", tokenization.tokenize, methods=["POST"], **document.TOKENIZE)
    app.add_api_route("/detokenize", tokenization.detokenize, methods=["POST"], **document.DETOKENIZE)


def _add_service(app: FastAPI, service: Service) -> None:
    app.add_api_route("/v1/models", service.list_models, methods=["GET"], **document.MODELS)
    app.add_api_route("/v1/models/{name:path}", service.get_model, methods=["GET"], **document.MODEL)
    app.add_api_route("/health", service.ready, methods=["GET"], **document.READY)
    app.add_api_route("/health/ready", service.ready, methods=["GET"], **document.READY)
    app.add_api_route("/health/live", service.live, methods=["GET"], **document.ALIVE)
    app.add_api_route("/health/startup", service.startup, methods=["GET"], **document.ALIVE)
    app.add_api_route("/version", service.version, methods=["GET"], **document.VERSION)
