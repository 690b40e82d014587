"""What the two ends of a simulated gRPC connection have in common: options, frames, and the messages of one call.

A frame is a tuple of its kind, the number of its call, and what the kind says:

    HEADERS   to the server: method, metadata, seconds left; to the client: metadata
    MESSAGE   the serialized message
    END       to the server: no more messages; to the client: code, details and trailing metadata
    RESET     code and details: the call is over, and messages under way do not count
    CREDIT    bytes that were read
    GOAWAY    to the client: this connection takes no calls after one of a number

Messages are limited by a window: a write returns once all but WINDOW_BYTES of what was written have been read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from grpc._cython import cygrpc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.simulation.network import End

HEADERS, MESSAGE, END, RESET, CREDIT, GOAWAY = "headers", "message", "end", "reset", "credit", "goaway"
WINDOW_BYTES = 65_535
DEFAULT_MAX_RECEIVE_BYTES = 4 * 1024 * 1024
_UNLIMITED = 2**31 - 1
# A call that the server has not seen is sent again on another connection, unless it has more bytes.
MAX_KEPT_BYTES = 256 * 1024
_METADATA_BYTES = 100
_CONTROL_BYTES = 20

Metadata = tuple[tuple[str, Any], ...]


class Options:
    """The options of a channel or a server that the simulation heeds, with gRPC's defaults."""

    def __init__(self, options: Sequence[tuple[str, Any]] | None) -> None:
        given = dict(options or ())
        self.max_receive_bytes = _limit(given.get("grpc.max_receive_message_length", DEFAULT_MAX_RECEIVE_BYTES))
        self.max_send_bytes = _limit(given.get("grpc.max_send_message_length", -1))
        # By default nothing is asked, or only every two hours.
        self.keepalive_seconds = given.get("grpc.keepalive_time_ms", _UNLIMITED) / 1000
        self.keepalive_timeout_seconds = given.get("grpc.keepalive_timeout_ms", 20_000) / 1000
        self.initial_backoff_seconds = given.get("grpc.initial_reconnect_backoff_ms", 1000) / 1000
        self.max_backoff_seconds = given.get("grpc.max_reconnect_backoff_ms", 120_000) / 1000
        self.connect_seconds = given.get("grpc.min_reconnect_backoff_ms", 20_000) / 1000

    def keep_alive(self, end: End) -> None:
        if self.keepalive_seconds < _UNLIMITED / 1000:
            end.keep_alive(self.keepalive_seconds, self.keepalive_timeout_seconds)


def _limit(num_bytes: int) -> int:
    return _UNLIMITED if num_bytes < 0 else num_bytes


def sendable(metadata: Any) -> Metadata:
    """Returns metadata as it arrives: values of `-bin` keys are bytes, others are strings."""
    return tuple(
        cygrpc._Metadatum(key, _to_bytes(value) if key.endswith("-bin") else _to_str(value))
        for key, value in metadata or ()
    )


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _to_str(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Stream:
    """The messages of one call at one end of a connection. One read and one write at a time, as in gRPC."""

    def __init__(self, end: End, number: int) -> None:
        self._end = end
        self._loop = asyncio.get_running_loop()
        self.number = number
        self.incoming: deque[bytes] = deque()
        # Whether the peer sends no more messages.
        self.peer_has_ended = False
        # Whether nothing can be sent or received any more.
        self.is_over = False
        self._num_unacknowledged = 0
        self._window = WINDOW_BYTES
        # What was sent, until `forget_sent`.
        self._sent: list[tuple[str, tuple[Any, ...], int]] | None = []
        self._num_kept_bytes = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    def send(self, kind: str, *values: Any, num_bytes: int = _CONTROL_BYTES) -> None:
        self._end.send((kind, self.number, *values), num_bytes)
        if self._sent is not None:
            self._sent.append((kind, values, num_bytes))
            self._num_kept_bytes += num_bytes
            if self._num_kept_bytes > MAX_KEPT_BYTES:
                self.forget_sent()

    def forget_sent(self) -> None:
        """Keeps nothing of what is sent: the peer has seen the call, or it is too large to be sent again."""
        self._sent = None

    def send_again(self, end: End, number: int) -> bool:
        """Sends all again on another connection; returns whether that is possible."""
        if self._sent is None:
            return False
        self._end, self.number = end, number
        for kind, values, num_bytes in self._sent:
            end.send((kind, number, *values), num_bytes)
        return True

    def send_headers(self, *values: Any) -> None:
        self.send(HEADERS, *values, num_bytes=_METADATA_BYTES)

    async def write(self, message: bytes) -> None:
        """Sends a message. Raises grpc's ExecuteBatchError once the call is over."""
        if not self.is_over:
            self.post(message)
            while self._window < 0 and not self.is_over:
                self._writer = self._loop.create_future()
                await self._writer
        # gRPC's thread answers, so another callback may always come between.
        await asyncio.sleep(0)
        if self.is_over:
            raise cygrpc.ExecuteBatchError("the call is over")

    def post(self, message: bytes) -> None:
        """Sends a message, whether or not the window is full."""
        self._window -= len(message)
        self.send(MESSAGE, message, num_bytes=len(message))

    async def read(self) -> bytes | None:
        """Waits for a message; None: there are no more."""
        while not self.incoming and not self.peer_has_ended and not self.is_over:
            self._reader = self._loop.create_future()
            await self._reader
        await asyncio.sleep(0)
        return self.take()

    def take(self) -> bytes | None:
        if not self.incoming:
            return None
        message = self.incoming.popleft()
        self._num_unacknowledged += len(message)
        # The peer learns it in half windows, or at once if it may wait for it.
        if self._num_unacknowledged >= WINDOW_BYTES // 2:
            self.send(CREDIT, self._num_unacknowledged)
            self._num_unacknowledged = 0
        return message

    def on_message(self, message: bytes) -> None:
        self.incoming.append(message)
        _wake(self._reader)

    def on_credit(self, num_bytes: int) -> None:
        self._window += num_bytes
        _wake(self._writer)

    def on_peer_end(self) -> None:
        self.peer_has_ended = True
        _wake(self._reader)

    def finish(self) -> None:
        """Ends all writes. Reads return what was not read yet."""
        self.is_over = True
        _wake(self._reader)
        _wake(self._writer)

    def close(self) -> None:
        """Ends all reads and writes; what was not read yet is gone."""
        self.incoming.clear()
        self.finish()

    def reset(self, code: int, details: str) -> None:
        """Ends the call at both ends."""
        if not self.is_over:
            self.send(RESET, code, details)
            self.close()


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
