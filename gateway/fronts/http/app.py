"""Combines the HTTP APIs in one application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.fronts.anthropic.endpoints import BODIES as MESSAGES_BODIES
from gateway.fronts.anthropic.endpoints import add_messages
from gateway.fronts.anthropic.models import add_models
from gateway.fronts.openai.app import make_app
from gateway.fronts.openai.schema.document import describe
from gateway.fronts.responses.endpoints import BODIES as RESPONSES_BODIES
from gateway.fronts.responses.endpoints import add_responses

if TYPE_CHECKING:
    from fastapi import FastAPI

    from gateway.generation import GenerationService


def make_http_app(generation: GenerationService) -> FastAPI:
    """Makes the application of all HTTP APIs for inference. An API without errors of its own uses OpenAI's form."""
    app = make_app(generation)
    add_messages(app, generation)
    add_models(app, generation)
    add_responses(app, generation)
    describe(app, (MESSAGES_BODIES, RESPONSES_BODIES))
    return app
