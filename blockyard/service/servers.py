"""Servers, and channels between them, set up alike in every process: limits, keepalive, errors, reflection.

What each option is for stands beside it; the facts behind them are in docs/concepts/protocol.md.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from blockyard.channels import INTERNAL_MESSAGE_BYTES, Options, channel_options
from blockyard.security.authentication import Authenticator
from blockyard.service import grpc_wakeups
from blockyard.service.interceptors import AuthenticationInterceptor, ErrorInterceptor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.security.authentication import Gate
    from blockyard.security.tls import Peer

MAX_PORT = 65535
# Metadata of one call, names and values together; gRPC allows twice as much before it closes the connection.
MAX_METADATA_BYTES = 16 * 1024
# Calls on one connection at once; those of a client that has more wait there, without a word: so that it gets
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
        """Returns the channel for the next call. Streams on an earlier one go on there until they end."""
        if (version := self._find_version()) != self._version:
            self._version = version
            self._channel = internal_channel(self._address, self._peer)
        return self._channel

    async def close(self) -> None:
        await self._channel.close(None)


class PortTaken(Exception):
    """A server cannot listen on its address; the message says why."""


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
        rules = "its folder must exist and be writable, no file may have its name, and a path has 107 bytes at most"
        raise PortTaken(f"cannot listen on {address}: {rules}")
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
    guards = [AuthenticationInterceptor(Authenticator(gate))] if gate is not None else []
    server = grpc.aio.server(options=options, interceptors=[ErrorInterceptor(), *interceptors, *guards])
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server
