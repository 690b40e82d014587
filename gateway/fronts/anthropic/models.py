"""Serves the models in Anthropic's form to clients that send the header of Anthropic's API."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.routing import Match

from gateway.fronts.anthropic.endpoints import AnsweringRoute
from gateway.fronts.http_calls.bodies import ANTHROPIC_VERSION

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Scope

    from blockyard.contract.models import Model
    from gateway.generation import GenerationService

_PATH = "/v1/models"


class VersionedRoute(AnsweringRoute):
    """A route for calls with the header that all Anthropic clients send. Other calls match the path's next route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return super().matches(scope) if ANTHROPIC_VERSION in Headers(scope=scope) else (Match.NONE, {})


class ModelEndpoints:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self._created_at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"

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
            "max_input_tokens": card.max_model_len,
        }


def add_models(app: FastAPI, generation: GenerationService) -> None:
    """Adds the routes to an application, before its routes of the same paths that require no header."""
    endpoints = ModelEndpoints(generation)
    app.router.routes[:0] = [
        VersionedRoute(_PATH, endpoints.list_models, methods=["GET"], include_in_schema=False),
        VersionedRoute(_PATH + "/{name:path}", endpoints.get_model, methods=["GET"], include_in_schema=False),
    ]
