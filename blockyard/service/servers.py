"""Creates gRPC servers and the channels between services: limits, keepalive, errors, reflection.

Comments explain the options; docs/concepts/protocol.md has the facts behind them.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from blockyard.channels import INTERNAL_MESSAGE_BYTES, Options, channel_options
from blockyard.security.authentication import Authenticator, Gate
from blockyard.service import grpc_wakeups
from blockyard.service.interceptors import AuthenticationInterceptor, ErrorInterceptor
from blockyard.transport import GRPC

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc
    import grpc.aio

    from blockyard.security.tls import Peer
    from blockyard.transport import Transport

MAX_PORT = 65535
# Bytes of a call's metadata, names and values together; above twice as much the connection is closed.
MAX_METADATA_BYTES = 16 * 1024
# Concurrent calls on one connection. Further calls of a client would wait silently, so the limit exceeds what a gateway
# takes: the client gets QUEUE_FULL instead.
MAX_CONCURRENT_STREAMS = 65_536
# Calls that have arrived and are not handled yet. By default gRPC cancels some of them at random above a thousand,
# without a reason; the handlers themselves refuse what is too much.
MAX_PENDING_CALLS = 1_000_000
# How long such a call may wait; gRPC's default of 30 seconds is too short for a busy process.
MAX_PENDING_SECONDS = 3600
HANDSHAKE_SECONDS = 20


def server_options(max_message_bytes: int) -> Options:
    """Returns the options of a server that receives messages of up to `max_message_bytes`."""
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


def internal_channel(address: str, peer: Peer | None = None, transport: Transport = GRPC) -> grpc.aio.Channel:
    """Opens a channel to another Blockyard service: `host:port`, or `unix:/path` on the same machine.

    `peer`: this service's certificate and the peer's expected name; None: without TLS or any check.
    """
    grpc_wakeups.prepare()
    # Services start together, and those that are up wait for the others: reconnect quickly.
    options = channel_options(INTERNAL_MESSAGE_BYTES, keepalive_seconds=5.0, use_proxy=False, max_reconnect_seconds=0.2)
    if peer is None:
        return transport.channel(address, options)
    options.append(("grpc.ssl_target_name_override", peer.name))
    return transport.channel(address, options, peer.credentials())


class RenewedChannel:
    """A channel to another service that is reopened when this process's certificate changes.

    A channel keeps presenting the certificate that it was opened with.
    """

    def __init__(self, address: str, peer: Peer | None = None, transport: Transport = GRPC) -> None:
        self._address = address
        self._peer = peer
        self._transport = transport
        self._version = self._find_version()
        self._channel = internal_channel(address, peer, transport)

    def _find_version(self) -> int:
        return self._peer.files.current().version if self._peer else 0

    def get(self) -> grpc.aio.Channel:
        """Returns the channel for the next call. Streams on an earlier channel go on there until they end."""
        if (version := self._find_version()) != self._version:
            self._version = version
            self._channel = internal_channel(self._address, self._peer, self._transport)
        return self._channel

    async def close(self) -> None:
        await self._channel.close(None)


class PortTaken(Exception):
    """A server cannot listen on its address; the message says why."""


def bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Binds a server to `host:port` (port 0: a free one) or `unix:/path`, and returns the port; raises PortTaken.

    With credentials the server uses TLS.

    The socket file of a killed process is taken over; that of a live process is not.
    """
    path = address.removeprefix("unix:") if address.startswith("unix:") else ""
    if path and _listens(path):
        raise PortTaken(f"cannot listen on {address}: another process listens there")
    try:
        # gRPC would take a too large port modulo 65536.
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
    """Returns whether a process listens on a Unix socket: gRPC would silently replace its file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            # The listener's queue is full.
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
    transport: Transport = GRPC,
) -> grpc.aio.Server:
    """Creates an aio server with options, error handling and reflection; the caller adds servicers and binds it.

    Args:
        max_message_bytes: the largest message that the server receives.
        service_names: services for reflection, beside health and reflection itself.
        gate: decides who may call closed methods; None: everybody.
        interceptors: they see refused calls too, and errors in their original type.
        max_connections: concurrent connections; 0: no limit.
        transport: makes the server.
    """
    grpc_wakeups.prepare()
    options = server_options(max_message_bytes)
    if max_connections:
        options.append(("grpc.max_allowed_incoming_connections", max_connections))
    guards = [AuthenticationInterceptor(Authenticator(gate))] if gate is not None else []
    server = transport.server(options, [ErrorInterceptor(), *interceptors, *guards])
    reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server
