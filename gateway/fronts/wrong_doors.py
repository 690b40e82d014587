"""Answers clients that use the wrong port: calls of another API's services, gRPC at the HTTP port."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import grpc

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

log = EventLogger(__name__)

# How often the log may say that clients use a wrong port: they must not fill it.
SECONDS_BETWEEN = 10.0
GRPC_PREFACE = b"PRI * HTTP/2.0"
TLS_PREFACE = b"\x16\x03"


class Elsewhere(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Refuses the methods of services that another port serves, and says which port."""

    def __init__(self, service_names: Collection[str], where: Callable[[], str]) -> None:
        """`where`: says which port this is, and which one it should be."""
        self._prefixes = tuple(f"/{name}/" for name in service_names)
        self._where = where

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Returns the handler of a call of one of these services; None for all others."""
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        if not method.startswith(self._prefixes):
            return None

        async def refuse(request: Any, context: Any) -> Any:
            raise BlockyardError(Reason.FEATURE_DISABLED, self._where())
            yield

        # Streams of messages as they come: it reads none of them.
        return grpc.stream_stream_rpc_method_handler(refuse)


class WrongDoorLog:
    """Logs that clients use a wrong port."""

    def __init__(self) -> None:
        self._said_at = -SECONDS_BETWEEN
        self._num_connections = 0

    def note(self, message: str) -> None:
        """Counts a connection, and logs the count every ten seconds at most."""
        self._num_connections += 1
        if time.monotonic() - self._said_at >= SECONDS_BETWEEN:
            log.warning(message, num_connections=self._num_connections)
            self._said_at, self._num_connections = time.monotonic(), 0


def http_refusal(message: str) -> bytes:
    """Returns an error in plain HTTP/1.1, which clients of gRPC and of TLS report."""
    content = message.encode() + b"\n"
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + content
