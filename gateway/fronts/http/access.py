"""Checks API keys and client certificates over HTTP, and limits the cost of connections.

The checks wrap the whole application, including routes that are added later. Knows no route.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import h11
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from blockyard.errors import BlockyardError, Reason
from blockyard.security.authentication import Authenticator, Credentials, Gate, find_key
from blockyard.telemetry import EventLogger
from gateway.fronts.anthropic import errors as anthropic_errors
from gateway.fronts.anthropic.endpoints import PATH as MESSAGES_PATH
from gateway.fronts.http_calls.bodies import ANTHROPIC_VERSION
from gateway.fronts.open_inference import errors as inference_errors
from gateway.fronts.open_inference.endpoints import is_path as is_inference_path
from gateway.fronts.openai.errors import error_response, response

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from fastapi import Response
    from starlette.types import ASGIApp, Receive, Scope, Send


log = EventLogger(__name__)

# The largest size of a request line with its headers.
MAX_HEADER_BYTES = 16 * 1024
# The longest time to receive a request, from its first byte or the beginning of its connection to its last byte.
REQUEST_SECONDS = 60.0
# The number of connections beyond the limit that are answered with an error, and their time to send a request. Further
# connections are closed.
MAX_REFUSED_CONNECTIONS = 1024
REFUSED_SECONDS = 5.0
# The key of the scope under which the connection passes the common name of the client's certificate.
_COMMON_NAME = "blockyard.common_name"


def with_authentication(app: ASGIApp, gate: Gate) -> ASGIApp:
    """Wraps an application so that the gate must admit a call, except for routes that are open to all."""
    authenticator = Authenticator(gate)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or authenticator.is_open(scope["path"]):
            await app(scope, receive, send)
            return
        with ExitStack() as stack:
            try:
                stack.enter_context(authenticator.enter(_credentials(scope), scope["path"]))
            except BlockyardError as error:
                await _refuse(error, scope, receive, send)
            else:
                await app(scope, receive, send)

    return guard


def with_bounded_head(app: ASGIApp) -> ASGIApp:
    """Wraps an application, and refuses requests whose line and headers exceed MAX_HEADER_BYTES.

    The HTTP parser only limits incomplete headers: headers that come in one piece may have any length.
    """

    async def bound(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _num_head_bytes(scope) <= MAX_HEADER_BYTES:
            await app(scope, receive, send)
            return
        fields = {
            "message": f"the request line and the headers have more than {MAX_HEADER_BYTES} bytes",
            "type": "invalid_request_error",
            "param": None,
            "code": "headers_too_large",
        }
        # The rest of the request is not read.
        await response(fields, 431, {"connection": "close"})(scope, receive, send)

    return bound


def _num_head_bytes(scope: Scope) -> int:
    line = len(scope["method"]) + len(scope["raw_path"]) + len(scope["query_string"]) + len(" ? HTTP/1.1\r\n")
    return line + sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])


def _credentials(scope: Scope) -> Credentials:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    return Credentials(find_key(headers), scope.get(_COMMON_NAME, ""))


async def _refuse(error: BlockyardError, scope: Scope, receive: Receive, send: Send) -> None:
    refusal = _error_response_for(scope)(error)
    if error.reason is Reason.UNAUTHENTICATED:
        refusal.headers["www-authenticate"] = "Bearer"
    # The rest of the request is not read.
    refusal.headers["connection"] = "close"
    await refusal(scope, receive, send)


def _error_response_for(scope: Scope) -> Callable[[BlockyardError], Response]:
    """Returns the function that answers an error in the form of the API that was called."""
    if scope["path"].startswith(MESSAGES_PATH) or ANTHROPIC_VERSION in Headers(scope=scope):
        return anthropic_errors.error_response
    return inference_errors.error_response if is_inference_path(scope["path"]) else error_response


async def _refuse_connection(scope: Scope, receive: Receive, send: Send) -> None:
    message = "this server has reached its limit of connections: try again"
    await _refuse(BlockyardError(Reason.QUEUE_FULL, message, retry_after_seconds=1.0), scope, receive, send)


class BoundedProtocol(H11Protocol):
    """Closes connections whose requests arrive too slowly, and refuses connections beyond the limit.

    uvicorn itself would wait for a request forever.
    """

    max_connections = 0
    request_seconds = REQUEST_SECONDS
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_excess = len(self.connections) - self.max_connections if self.max_connections else 0
        if num_excess > MAX_REFUSED_CONNECTIONS:
            log.debug("too many connections", max_connections=self.max_connections)
            transport.abort()
            return
        if num_excess > 0:
            self.app, self.request_seconds = _refuse_connection, REFUSED_SECONDS
        elif name := _common_name(transport.get_extra_info("peercert")):
            self.app: Any = _with_common_name(self.app, name)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        if not self._awaits_more():
            self._clear_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.request_seconds, self._give_up)

    def _awaits_more(self) -> bool:
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        log.debug("a request was not received in time", seconds=self.request_seconds)
        self.transport.abort()


def bounded_protocol(max_connections: int) -> type[BoundedProtocol]:
    """Makes the protocol class of a listener with at most `max_connections` at once; 0: no limit."""
    return type("BoundedProtocol", (BoundedProtocol,), {"max_connections": max_connections})


def _with_common_name(app: ASGIApp, common_name: str) -> ASGIApp:
    """Wraps an application for one connection: its calls get the common name of the client's certificate."""

    async def named(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_COMMON_NAME] = common_name
        await app(scope, receive, send)

    return named


def _common_name(certificate: dict[str, Any] | None) -> str:
    """Returns the common name in a certificate as `ssl` parses it; empty without one."""
    subject = (certificate or {}).get("subject", ())
    return next((value for part in subject for name, value in part if name == "commonName"), "")
