"""Serves the page's files and `/status`. Does not depend on the page's contents.

The files are read once, at the start, and only these files are served. Their headers forbid the page to load anything
from other servers and to run anything but its own files: no script in a model's output, and none in an attribute.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import FastAPI, Request, Response
from google.protobuf import json_format
from starlette.exceptions import HTTPException

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from google.protobuf.message import Message


# An answer younger than this is reused.
MAX_AGE_SECONDS = 0.5


class StatusBoard:
    """Queries the status of each model's system and reuses an answer for half a second."""

    def __init__(
        self, ask: Callable[[str], Coroutine[Any, Any, Message]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Makes no query yet.

        Args:
            ask: returns the status with the scheduler of a model; without a name, that of the first model.
            clock: a monotonic clock, in seconds.
        """
        self._ask = ask
        self._clock = clock
        self._answers: dict[str, _Answer] = {}

    async def encode(self, model: str = "") -> bytes:
        """Returns the status as JSON. Callers that come during a query wait for the same answer.

        Raises BlockyardError MODEL_NOT_FOUND.
        """
        now = self._clock()
        # Names come from callers: none is kept for longer than its answer.
        self._answers = {name: answer for name, answer in self._answers.items() if not answer.is_old(now)}
        if model not in self._answers:
            self._answers[model] = _Answer(asyncio.create_task(self._make(model), name="status"), now)
        # A cancelled caller must not cancel the query for the other callers.
        return await asyncio.shield(self._answers[model].task)

    async def _make(self, model: str) -> bytes:
        fields = json_format.MessageToDict(
            await self._ask(model), preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        return json.dumps(fields).encode()


class _Answer(NamedTuple):
    """A query, and the time at which it began."""

    task: asyncio.Task[bytes]
    asked_at: float

    def is_old(self, now: float) -> bool:
        return self.task.done() and now - self.asked_at >= MAX_AGE_SECONDS


INDEX = "index.html"

# `blockyard.security.authentication` leaves the paths of the files open, which are the same for everybody. It must not
# leave this path open.
STATUS_PATH = "/status"

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

_HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    # The browser asks again each time, and gets 304 as long as the file is unchanged.
    "cache-control": "no-cache",
}

_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Asset(NamedTuple):
    content: bytes
    media_type: str
    tag: str


def load_assets() -> dict[str, Asset]:
    files = (resources.files(__package__ or "") / "static").iterdir()
    return {file.name: _asset(file.name, file.read_bytes()) for file in files}


def _asset(name: str, content: bytes) -> Asset:
    media_type = _MEDIA_TYPES[name[name.rindex(".") :]]
    return Asset(content, media_type, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def add_page(app: FastAPI, board: StatusBoard) -> None:
    """Adds the page's routes and `/status` to an application."""
    assets = load_assets()

    async def index(request: Request) -> Response:
        return _answer(request, assets, INDEX)

    async def file(request: Request, name: str) -> Response:
        return _answer(request, assets, name)

    async def status(model: str = "") -> Response:
        """Returns the status of the gateway, a model's scheduler and its workers, as AdminService.GetStatus does."""
        content = await board.encode(model)
        return Response(content, headers={"cache-control": "no-store"}, media_type="application/json")

    # These routes do not belong to the APIs that the OpenAPI document describes.
    app.add_api_route("/", index, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/page/{name}", file, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route(STATUS_PATH, status, methods=["GET"], include_in_schema=False)


def _answer(request: Request, assets: Mapping[str, Asset], name: str) -> Response:
    asset = assets.get(name)
    if asset is None:
        raise HTTPException(404, "Not Found")
    headers = {**_HEADERS, "etag": asset.tag}
    if asset.tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(asset.content, headers=headers, media_type=asset.media_type)
