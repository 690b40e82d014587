"""Options of gRPC channels, for clients and between services. Imports no server code."""

from __future__ import annotations

from typing import Any

PUBLIC_MESSAGE_BYTES = 16 * 1024 * 1024
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
Options = list[tuple[str, Any]]


def channel_options(
    max_message_bytes: int,
    *,
    keepalive_seconds: float = 30.0,
    use_proxy: bool = True,
    max_reconnect_seconds: float = 1.0,
) -> Options:
    """Returns options of a channel that detects a dead peer within twice `keepalive_seconds`.

    `max_message_bytes` limits received messages. `use_proxy`: follow the environment's `http_proxy`, which gRPC does
    even for a peer on the same machine.
    """
    return [
        ("grpc.enable_http_proxy", int(use_proxy)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", int(keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_seconds * 1000)),
        # The time after which a ping counts as unanswered; a minute by default.
        ("grpc.http2.ping_timeout_ms", int(keepalive_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A peer that comes back is tried again soon, not after two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, also the least time that one attempt to connect may take: a busy peer needs longer to answer
        # than the first back-off.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", int(max_reconnect_seconds * 1000)),
        # Channels to one address from one process stay apart, so that closing one does not touch the other.
        ("grpc.use_local_subchannel_pool", 1),
    ]
