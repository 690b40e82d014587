"""Channels and servers, set up alike in every process: limits, keepalive, errors, health, reflection.

What each option is for stands beside it; the facts behind them are in docs/concepts/protocol.md.
"""

from __future__ import annotations

import asyncio
import inspect
import socket
import threading
import time
from concurrent import futures
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from blockyard.errors import BlockyardError, Reason, to_status
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence

log = EventLogger(__name__)

PUBLIC_MESSAGE_BYTES = 16 * 1024 * 1024
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_PORT = 65535
Options = list[tuple[str, Any]]


def server_options(max_message_bytes: int) -> Options:
    """Options of a server that receives messages up to this size."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        # Two servers on one port would share its connections in silence; a taken port has to be an error.
        ("grpc.so_reuseport", 0),
        # By default a client that pings more often than every five minutes is dropped.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
    ]


def channel_options(
    max_message_bytes: int,
    *,
    keepalive_seconds: float = 30.0,
    use_proxy: bool = True,
    max_reconnect_seconds: float = 1.0,
) -> Options:
    """Options of a channel that receives messages up to this size and notices a dead peer within twice `keepalive`.

    `use_proxy`: heed the environment's `http_proxy`, which gRPC does even for a peer on the same machine.
    """
    return [
        ("grpc.enable_http_proxy", int(use_proxy)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_seconds * 1000)),
        # What counts for a ping without an answer; a minute, unless told otherwise.
        ("grpc.http2.ping_timeout_ms", int(keepalive_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A peer that comes back is tried again soon, not after two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In spite of its name, also the time that one attempt to connect may take at least: a busy peer needs more
        # than the first back-off to answer.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", int(max_reconnect_seconds * 1000)),
        # Channels to one address from one process stay apart, so that closing one does not touch the other.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def internal_channel(address: str) -> grpc.aio.Channel:
    """Opens a channel to another service of ours: `host:port`, or `unix:/path` on the same machine."""
    # Services start at once, and those that are up wait for the others.
    options = channel_options(INTERNAL_MESSAGE_BYTES, keepalive_seconds=5.0, use_proxy=False, max_reconnect_seconds=0.2)
    return grpc.aio.insecure_channel(address, options)


class PortTaken(Exception):
    """The address that a server was told to listen on cannot be had."""


def bind(server: grpc.aio.Server, address: str) -> int:
    """Binds a server to `host:port` (port 0: a free one) or `unix:/path`, and returns the port; raises PortTaken.

    The socket file of a process that was killed is taken over; that of one which lives is not.
    """
    path = address.removeprefix("unix:") if address.startswith("unix:") else ""
    if path and _listens(path):
        raise PortTaken(f"cannot listen on {address}: another process listens there")
    try:
        # gRPC takes a port too large modulo 65536.
        port = 0 if not path and _is_too_large(address.rpartition(":")[2]) else server.add_insecure_port(address)
    except RuntimeError:
        port = 0
    if port == 0 and path:
        told = "its folder must exist and be writable, no file may have its name, and a path has 107 bytes at most"
        raise PortTaken(f"cannot listen on {address}: {told}")
    if port == 0:
        raise PortTaken(f"cannot listen on {address}: the port is taken, or the host is not this machine's")
    return port


def _is_too_large(port: str) -> bool:
    return port.isdecimal() and int(port) > MAX_PORT


def _listens(path: str) -> bool:
    """Whether a process listens on a Unix socket: gRPC would take its file away without a word."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            # Its queue is full.
            return True
        except OSError:
            return False
    return True


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BlockyardError) -> None:
    """Ends a call with an error and its details. Never returns: it raises what ends the handler."""
    # The published stubs of grpc.aio lack this method.
    await cast("Any", context).abort_with_status(rpc_status.to_status(to_status(error)))


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Turns what a handler raises into a status: a BlockyardError as it is, anything else into BUG with a log line.

    A cancelled handler whose client is still there would leave it hanging: it is told DRAINING, since only a server
    that stops cancels its handlers.
    """

    async def intercept_service(self, continuation: Any, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method  # type: ignore[attr-defined]
        if method.startswith(("/grpc.health.", "/grpc.reflection.")):
            return handler
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        inner = getattr(handler, _METHOD_FIELD[handler.request_streaming, handler.response_streaming])
        guard = _guard_stream if inspect.isasyncgenfunction(inner) else _guard_coroutine
        return make(guard(inner, method), handler.request_deserializer, handler.response_serializer)


# Where grpc keeps the behaviour of a handler, by (request_streaming, response_streaming).
_METHOD_FIELD = {
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


def _guard_coroutine(inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(request, context)
        except BaseException as error:  # noqa: BLE001 - this is the one boundary
            await _answer(error, context, method)

    return guarded


def _guard_stream(inner: Callable[..., AsyncGenerator[Any]], method: str) -> Callable[..., AsyncGenerator[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
        try:
            # A call that ends while a message is being sent must not leave the handler suspended until it is collected.
            async with aclosing(inner(request, context)) as messages:
                async for message in messages:
                    yield message
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - this is the one boundary
            await _answer(error, context, method)

    return guarded


async def _answer(error: BaseException, context: grpc.aio.ServicerContext[Any, Any], method: str) -> None:
    if isinstance(error, grpc.aio.AbortError | GeneratorExit | KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, asyncio.CancelledError):
        if context.cancelled():
            raise error
        told = BlockyardError(Reason.DRAINING, "this server is stopping", retry_after_seconds=1.0)
    elif isinstance(error, BlockyardError):
        told = error
    else:
        log.exception("a handler failed", method=method)
        told = BlockyardError(Reason.BUG, "internal error; the server's log has more")
    # The call may have ended meanwhile, by its client or by the server's stop: then nobody is left to be told.
    with suppress(grpc.aio.InternalError):
        await abort(context, told)
    raise asyncio.CancelledError


def make_server(max_message_bytes: int, service_names: Sequence[str]) -> grpc.aio.Server:
    """Makes an aio server with our options, errors and reflection; the caller adds its servicers and binds it."""
    server = grpc.aio.server(options=server_options(max_message_bytes), interceptors=[ErrorInterceptor()])
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


class Heartbeat:
    """Says whether the event loop that it was started on still turns."""

    def __init__(self, max_age_seconds: float = 5.0, interval_seconds: float = 1.0) -> None:
        self._max_age_seconds = max_age_seconds
        self._interval_seconds = interval_seconds
        self._beat = time.monotonic()

    def start(self) -> None:
        """Begins to beat on the running loop."""
        self._tick(asyncio.get_running_loop())

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat = time.monotonic()
        loop.call_later(self._interval_seconds, self._tick, loop)

    def is_alive(self) -> bool:
        """Tells it; may be called from any thread."""
        return time.monotonic() - self._beat < self._max_age_seconds


class HealthServer:
    """grpc.health.v1 from a thread and a port of its own, so that a busy loop cannot make it late.

    Services: "liveness", "readiness", and "" which equals readiness.
    """

    def __init__(self, is_live: Callable[[], bool], is_ready: Callable[[], bool], period_seconds: float = 0.25) -> None:
        self._probes = {"liveness": is_live, "readiness": is_ready, "": is_ready}
        self._period_seconds = period_seconds
        self._servicer = health.HealthServicer(experimental_non_blocking=True)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(4, "health"), options=server_options(PUBLIC_MESSAGE_BYTES)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="health-probes", daemon=True)

    def start(self, address: str) -> int:
        """Listens on `host:port` and returns the port; raises PortTaken."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise PortTaken(f"cannot listen on {address} for health: the port is taken") from None
        self._update()
        self._server.start()
        self._thread.start()
        return port

    def _update(self) -> None:
        for name, probe in self._probes.items():
            status = health_pb2.HealthCheckResponse.ServingStatus
            self._servicer.set(name, status.SERVING if self._holds(name, probe) else status.NOT_SERVING)

    def _holds(self, name: str, probe: Callable[[], bool]) -> bool:
        try:
            return probe()
        except Exception:  # the last good answer must not stand for ever because a probe broke
            log.exception("a health probe failed", probe=name or "readiness")
            return False

    def _watch(self) -> None:
        while not self._stopping.wait(self._period_seconds):
            self._update()

    def stop(self) -> None:
        """Stops answering, and returns when its port is free. Without effect before `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._server.stop(grace=0).wait()


def add_health(server: grpc.aio.Server, is_ready: Callable[[], bool], is_live: Callable[[], bool]) -> None:
    """Answers grpc.health.v1 on a service's own port too, where clients look for it first."""
    health_pb2_grpc.add_HealthServicer_to_server(_LiveHealth(is_ready, is_live), server)


class _LiveHealth(health_pb2_grpc.HealthServicer):
    def __init__(self, is_ready: Callable[[], bool], is_live: Callable[[], bool]) -> None:
        self._probes = {"": is_ready, "readiness": is_ready, "liveness": is_live}

    def _response(self, service: str) -> health_pb2.HealthCheckResponse | None:
        probe = self._probes.get(service)
        if probe is None:
            return None
        status = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(status=status.SERVING if probe() else status.NOT_SERVING)

    async def Check(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        response = self._response(request.service)
        if response is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return response

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        last: Any = None
        with suppress(asyncio.CancelledError):
            while True:
                unknown = health_pb2.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN
                response = self._response(request.service) or health_pb2.HealthCheckResponse(status=unknown)
                if response != last:
                    yield response
                    last = response
                await asyncio.sleep(0.25)
