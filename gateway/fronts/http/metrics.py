"""Answers `GET /metrics` on the HTTP port, and counts all HTTP requests. Knows no other route."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response

from gateway.observe.metrics import GatewayMetrics, collect_errors

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


PATH = "/metrics"
# Standard methods. A client's invented methods must not become labels.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"
# The prefix of probes. The error that a probe gets while the gateway is not ready does not count.
_PROBES = "/health"
_CLIENT_GONE = 499


def add_metrics(app: FastAPI, metrics: GatewayMetrics) -> None:
    async def answer(request: Request) -> Response:
        # Encode in a thread, so that the event loop's streams do not wait for a scrape.
        accept = request.headers.get("accept", "")
        content, content_type = await asyncio.to_thread(metrics.registry.encode, accept)
        return Response(content, headers={"content-type": content_type})

    app.add_api_route(PATH, answer, methods=["GET"], include_in_schema=False)


def with_request_counts(app: ASGIApp, metrics: GatewayMetrics) -> ASGIApp:
    """Wraps an application, and counts each request and its errors when the request has ended."""

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        errors, status = collect_errors(), _CLIENT_GONE

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await app(scope, receive, noting_send)
        finally:
            path: str = getattr(scope.get("route"), "path", OTHER)
            method: str = scope["method"]
            metrics.http_requests.add(method if method in _METHODS else OTHER, path, str(status))
            for reason in () if path.startswith(_PROBES) else errors:
                metrics.errors.add("http", str(reason))

    return count
