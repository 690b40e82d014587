"""Options of gRPC channels, those of clients and those between services. Imports no server."""

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
    """Options of a channel that receives messages up to this size and notices a dead peer within twice `keepalive`.

    `use_proxy`: heed the environment's `http_proxy`, which gRPC does even for a peer on the same machine.
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
        # In spite of its name, also the time that one attempt to connect may take at least: a busy peer needs more
        # than the first back-off to answer.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", int(max_reconnect_seconds * 1000)),
        # Channels to one address from one process stay apart, so that closing one does not touch the other.
        ("grpc.use_local_subchannel_pool", 1),
    ]
