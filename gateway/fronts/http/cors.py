"""Lets web pages of some origins call the HTTP APIs, by the CORS protocol. Knows no route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_METHODS = ("GET", "POST", "DELETE")
# Headers of an answer that scripts may read besides those that they always may.
_EXPOSED = ("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry", "www-authenticate")
_PREFLIGHT_SECONDS = 600


def with_cors(app: ASGIApp, origins: str) -> ASGIApp:
    """Wraps an application so that pages of these origins (with commas between) can call it; '': of none but its own.

    Stands before the check of keys: a browser sends none with its preflight request.
    """
    allowed = [origin.strip() for origin in origins.split(",") if origin.strip()]
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=_METHODS,
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=_PREFLIGHT_SECONDS,
    )
