"""Allows web pages of some origins to call the HTTP APIs, by the CORS protocol. Knows no route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.middleware.cors import CORSMiddleware

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_METHODS = ("GET", "POST", "DELETE")
# Headers of an answer that scripts may read, in addition to those that CORS always allows.
_EXPOSED = ("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry", "www-authenticate")
_PREFLIGHT_SECONDS = 600


def with_cors(app: ASGIApp, origins: str) -> ASGIApp:
    """Wraps an application so that pages of some origins can call it.

    Must wrap the check of keys: a browser sends no key with its preflight request.

    `origins`: separated by commas; empty: only pages of the gateway's own origin.
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
