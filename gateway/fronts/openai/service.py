"""Serves the models, the health and the version of the service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi.responses import JSONResponse

from blockyard.errors import BlockyardError, Reason
from blockyard.version import __version__

if TYPE_CHECKING:
    from blockyard.contract.models import Model
    from gateway.generation import GenerationService

_OK = {"status": "ok"}


class Service:
    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self._created = int(time.time())

    async def list_models(self) -> JSONResponse:
        """Lists the served model and its adapters."""
        models = [self._model(card) for card in self._generation.models()]
        return JSONResponse({"object": "list", "data": models})

    async def get_model(self, name: str) -> JSONResponse:
        """Returns one model."""
        return JSONResponse(self._model(self._generation.find_model(name)))

    def _model(self, card: Model) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "blockyard",
            "parent": card.parent or None,
            "max_model_len": card.max_model_len,
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
