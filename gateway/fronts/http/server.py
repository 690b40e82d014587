"""Runs an ASGI application with uvicorn, on a socket and with the signal handling of this process, and applies CORS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from blockyard.security.tls import http_context
from blockyard.service.roots import start_task
from blockyard.service.servers import PortTaken
from gateway.access import Access
from gateway.call_context import with_http_call
from gateway.fronts.anthropic.endpoints import BODIES as MESSAGES_BODIES
from gateway.fronts.anthropic.endpoints import add_messages, add_models
from gateway.fronts.http.access import MAX_HEADER_BYTES, bounded_protocol, with_authentication, with_bounded_head
from gateway.fronts.http.body_places import with_body_places
from gateway.fronts.http.metrics import with_request_counts
from gateway.fronts.open_inference.bodies import HEADER_LENGTH
from gateway.fronts.open_inference.endpoints import BODIES as INFERENCE_BODIES
from gateway.fronts.open_inference.endpoints import add_open_inference
from gateway.fronts.openai.app import make_app
from gateway.fronts.openai.schema.document import describe
from gateway.fronts.responses.endpoints import BODIES as RESPONSES_BODIES
from gateway.fronts.responses.endpoints import INPUT_FORM, add_responses

if TYPE_CHECKING:
    from collections.abc import Generator

    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from gateway.generation import GenerationService
    from gateway.observe.metrics import GatewayMetrics


def make_http_app(generation: GenerationService) -> FastAPI:
    """Makes the application of all HTTP APIs for inference. An API without errors of its own uses OpenAI's form."""
    app = make_app(generation, (INPUT_FORM,))
    add_messages(app, generation)
    add_models(app, generation)
    add_responses(app, generation)
    add_open_inference(app, generation)
    describe(app, (MESSAGES_BODIES, RESPONSES_BODIES, INFERENCE_BODIES))
    return app


_METHODS = ("GET", "POST", "DELETE")

# Headers of an answer that scripts may read, in addition to those that CORS always allows.
_EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    "x-should-retry",
    "www-authenticate",
    HEADER_LENGTH,
)

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


# The number of connections that may wait to be accepted. Clients of further connections retry after a second.
_BACKLOG = 4096

# When the server stops, connections that are still open after this time are closed.
_GRACE_SECONDS = 2

_DATE_SECONDS = 1.0


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._exit_requested = asyncio.Event()

    async def main_loop(self) -> None:
        """Waits for `exit`, and updates the answers' date each second; uvicorn's own loop wakes ten times a second."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._exit_requested.wait()

    def exit(self) -> None:
        self.should_exit = True
        self._exit_requested.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Installs no signal handlers: the process drains before it stops."""
        yield


class HttpFront:
    """Serves an ASGI application on a port.

    Attributes:
        app: the application with what is around it: access, CORS, counts.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access | None = None,
        metrics: GatewayMetrics | None = None,
        *,
        allowed_origins: str = "",
    ) -> None:
        """Prepares the server; it does not listen yet.

        Args:
            app: the application.
            access: the requirements for clients; None: no requirements.
            metrics: the metrics that count requests.
            allowed_origins: origins whose web pages may call the application, separated by commas.
        """
        access = access or Access()
        app = with_body_places(app)
        app = with_authentication(app, access.api) if access.api else app
        app = with_cors(with_bounded_head(app), allowed_origins)
        self.app = with_http_call(with_request_counts(app, metrics) if metrics else app)
        files = access.files
        self._server = _Server(
            uvicorn.Config(
                self.app,
                http=bounded_protocol(access.max_connections),
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                backlog=_BACKLOG,
                ssl_context_factory=(lambda *_: http_context(files)) if files else None,
                log_config=None,
                # uvicorn warns of each malformed request, with which any client could fill the log.
                log_level="error",
                access_log=False,
                server_header=False,
                ws="none",
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """Binds the port (0: any free port) and returns it; raises PortTaken."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise PortTaken(f"cannot listen on {host}:{port}: {error.strerror}") from None
        return self._socket.getsockname()[1]

    def start(self) -> None:
        assert self._socket is not None
        self._task = start_task(self._server.serve(sockets=[self._socket]), "http")

    async def stop(self) -> None:
        """Waits briefly for running answers, and closes the port."""
        self._server.exit()
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._socket is not None:
            self._socket.close()
