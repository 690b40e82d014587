"""Servers, and channels between them, set up alike in every process: limits, keepalive, errors, health, reflection.

What each option is for stands beside it; the facts behind them are in docs/concepts/protocol.md.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent import futures
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from blockyard.channels import INTERNAL_MESSAGE_BYTES, PUBLIC_MESSAGE_BYTES, Options, channel_options
from blockyard.security.authentication import Doorkeeper
from blockyard.service import grpc_wakeups
from blockyard.service.interceptors import AuthenticationInterceptor, ErrorInterceptor
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from blockyard.security.authentication import Gate
    from blockyard.security.tls import Peer

log = EventLogger(__name__)

MAX_PORT = 65535
# Of one call, names and values together; gRPC itself allows twice as much before it closes the connection.
MAX_METADATA_BYTES = 16 * 1024
# Calls on one connection at once; those of a client that has more wait there, without a word: so that it is told
# QUEUE_FULL, this is more than a gateway takes.
MAX_CONCURRENT_STREAMS = 65_536
# Calls that have come and were not looked at yet. gRPC itself cancels them from a thousand on, at random, and without
# a reason; what is too much is refused by who answers them.
MAX_PENDING_CALLS = 1_000_000
# How long such a call may lie there; gRPC cancels it after half a minute, and a busy process may need longer.
MAX_PENDING_SECONDS = 3600
HANDSHAKE_SECONDS = 20


def server_options(max_message_bytes: int) -> Options:
    """Options of a server that receives messages up to this size."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
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


def internal_channel(address: str, peer: Peer | None = None) -> grpc.aio.Channel:
    """Opens a channel to another service of ours: `host:port`, or `unix:/path` on the same machine.

    `peer`: who it has to be there, by its certificate, and ours; None: whoever answers, in the clear.
    """
    grpc_wakeups.prepare()
    # Services start at once, and those that are up wait for the others.
    options = channel_options(INTERNAL_MESSAGE_BYTES, keepalive_seconds=5.0, use_proxy=False, max_reconnect_seconds=0.2)
    if peer is None:
        return grpc.aio.insecure_channel(address, options)
    options.append(("grpc.ssl_target_name_override", peer.name))
    return grpc.aio.secure_channel(address, peer.credentials(), options)


class RenewedChannel:
    """A channel to another service of ours, opened anew when this process has got another certificate.

    A connection shows the certificate that its channel was opened with, for ever.
    """

    def __init__(self, address: str, peer: Peer | None = None) -> None:
        self._address = address
        self._peer = peer
        self._version = self._find_version()
        self._channel = internal_channel(address, peer)

    def _find_version(self) -> int:
        return self._peer.files.current().version if self._peer else 0

    def get(self) -> grpc.aio.Channel:
        """Gives the channel for the next call. Streams on an earlier one go on there until they end."""
        if (version := self._find_version()) != self._version:
            self._version = version
            self._channel = internal_channel(self._address, self._peer)
        return self._channel

    async def close(self) -> None:
        """Closes it."""
        await self._channel.close(None)


class PortTaken(Exception):
    """The address that a server was told to listen on cannot be had."""


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Binds a server to `host:port` (port 0: a free one) or `unix:/path`, and returns the port; raises PortTaken.

    With credentials it speaks TLS there.

    The socket file of a process that was killed is taken over; that of one which lives is not.
    """
    path = address.removeprefix("unix:") if address.startswith("unix:") else ""
    if path and _listens(path):
        raise PortTaken(f"cannot listen on {address}: another process listens there")
    try:
        # gRPC takes a port too large modulo 65536.
        port = 0 if not path and _is_too_large(address.rpartition(":")[2]) else _add_port(server, address, credentials)
    except RuntimeError:
        port = 0
    if port == 0 and path:
        told = "its folder must exist and be writable, no file may have its name, and a path has 107 bytes at most"
        raise PortTaken(f"cannot listen on {address}: {told}")
    if port == 0:
        raise PortTaken(f"cannot listen on {address}: the port is taken, or the host is not this machine's")
    return port


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, credentials)


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


def make_server(
    max_message_bytes: int,
    service_names: Sequence[str],
    *,
    gate: Gate | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
    max_connections: int = 0,
) -> grpc.aio.Server:
    """Makes an aio server with our options, errors and reflection; the caller adds its servicers and binds it.

    Args:
        max_message_bytes: size of a message that it receives.
        service_names: for reflection, beside its own and that of health.
        gate: who may call what is not open to all; None: everybody.
        interceptors: see calls that are refused too, and errors as they were raised.
        max_connections: connections at once; 0: no limit.
    """
    grpc_wakeups.prepare()
    options = server_options(max_message_bytes)
    if max_connections:
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    guards = [AuthenticationInterceptor(Doorkeeper(gate))] if gate is not None else []
    server = grpc.aio.server(options=options, interceptors=[ErrorInterceptor(), *interceptors, *guards])
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server


class Heartbeat:
    """Says whether the event loop that it was started on still turns."""

    def __init__(self, max_age_seconds: float = 5.0, interval_seconds: float = 1.0) -> None:
        self._max_age_seconds = max_age_seconds
        self._interval_seconds = interval_seconds
        self._beat = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begins to beat on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._tick(self._loop)

    def num_tasks(self) -> int:
        """Counts the tasks of the loop that are not done; may be called from any thread."""
        return len(asyncio.all_tasks(self._loop)) if self._loop else 0

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat = time.monotonic()
        loop.call_later(self._interval_seconds, self._tick, loop)

    def is_alive(self) -> bool:
        """Tells it; may be called from any thread."""
        return time.monotonic() - self._beat < self._max_age_seconds


class HealthServer:
    """grpc.health.v1 from a thread and a port of its own, so that a busy loop cannot make it late.

    Services: "liveness", "readiness", "" which equals readiness, and others that a process names.
    """

    def __init__(
        self,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
        period_seconds: float = 0.25,
        **others: Callable[[], bool],
    ) -> None:
        self._probes = {"liveness": is_live, "readiness": is_ready, "": is_ready, **others}
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


def add_health(
    server: grpc.aio.Server, is_ready: Callable[[], bool], is_live: Callable[[], bool], **others: Callable[[], bool]
) -> None:
    """Answers grpc.health.v1 on a service's own port too, where clients look for it first."""
    health_pb2_grpc.add_HealthServicer_to_server(_LiveHealth(is_ready, is_live, **others), server)


class _LiveHealth(health_pb2_grpc.HealthServicer):
    def __init__(self, is_ready: Callable[[], bool], is_live: Callable[[], bool], **others: Callable[[], bool]) -> None:
        self._probes = {"": is_ready, "readiness": is_ready, "liveness": is_live, **others}

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
