"""One stream between two processes of a machine: messages as frames on a Unix socket, in order, with an end.

A frame is its payload's length (4 bytes, little-endian), its kind (1 byte) and the payload. Both sides say something
every few seconds, so that a peer which hangs is noticed. Knows neither what is in a message nor who serves what.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, cast

import grpc
from google.rpc import status_pb2

from blockyard.errors import BlockyardError, Reason, from_status

if TYPE_CHECKING:
    from collections.abc import Callable

_HEAD = struct.Struct("<IB")
# Kinds. The client's first frame names the method; the server's last one says how it ended.
OPEN, MESSAGE, END, PING = range(4)
MAX_FRAME_BYTES = 64 * 1024 * 1024
_BUFFER_BYTES = 64 * 1024
# Messages that may wait for their reader before no more are taken from the socket.
_MAX_WAITING = 1024
PING_SECONDS = 3.0
# So many periods without a word, and the peer is given up; a period in which this process stood still counts once.
MAX_SILENT_PERIODS = 3


class _Ended(NamedTuple):
    error: BlockyardError | None


def broken(message: str) -> BlockyardError:
    """The error of a connection that is no more, as gRPC's own would be told."""
    return from_status(status_pb2.Status(code=cast("int", grpc.StatusCode.UNAVAILABLE.value[0]), message=message))


class Connection(asyncio.BufferedProtocol):
    """One end of a stream. One task reads; whoever writes does so in the loop.

    Args:
        on_open: told the method that the other side asks for.
        on_lost: told when the connection is gone, however that came.
    """

    def __init__(
        self, on_open: Callable[[Connection, str], None] | None = None, on_lost: Callable[[], object] | None = None
    ) -> None:
        self.on_lost = on_lost
        self._on_open = on_open
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._rest = bytearray()
        self._messages: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._ended: _Ended | None = None
        self._has_sent = False
        self._num_silent = 0
        self._timer: asyncio.TimerHandle | None = None

    # The transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begins to listen for silence."""
        self._transport = cast("asyncio.Transport", transport)
        self._timer = self._loop.call_later(PING_SECONDS, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the stream, if it had not ended."""
        if self._timer is not None:
            self._timer.cancel()
        self._end(broken(f"the connection was lost: {exc}" if exc else "the connection was closed"))
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        if self.on_lost is not None:
            self.on_lost()

    def pause_writing(self) -> None:
        """The other side is slow."""
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Takes bytes, and all frames that are whole with them."""
        self._num_silent = 0
        if self._rest:
            self._rest += self._buffer[:nbytes]
            del self._rest[: self._take_frames(self._rest)]
        else:
            taken = self._take_frames(self._buffer[:nbytes])
            self._rest += self._buffer[taken:nbytes]

    def _take_frames(self, data: bytearray | memoryview) -> int:
        """Takes the whole frames at the beginning, and returns their size."""
        begin = 0
        while len(data) - begin >= _HEAD.size:
            size, kind = _HEAD.unpack_from(data, begin)
            end = begin + _HEAD.size + size
            if size > MAX_FRAME_BYTES:
                self.abort(BlockyardError(Reason.MESSAGE_TOO_LARGE, f"a message of {size} bytes"))
                return len(data)
            if end > len(data):
                break
            self._take(kind, bytes(data[begin + _HEAD.size : end]))
            begin = end
        return begin

    def _take(self, kind: int, payload: bytes) -> None:
        if self._ended is not None:
            return
        if kind == MESSAGE:
            self._messages.append(payload)
            self._wake()
            if len(self._messages) == _MAX_WAITING and self._transport is not None:
                self._transport.pause_reading()
        elif kind == END:
            self._end(from_status(status_pb2.Status.FromString(payload)) if payload else None)
        elif kind == OPEN and self._on_open is not None:
            self._on_open(self, payload.decode())

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _tick(self) -> None:
        if self._ended is not None and self._transport is not None:
            # The other side had time to read how it ended.
            self._transport.abort()
            return
        self._timer = self._loop.call_later(PING_SECONDS, self._tick)
        if not self._has_sent:
            self.send(PING)
        self._has_sent = False
        # What the reader leaves in the socket is no silence.
        self._num_silent += len(self._messages) < _MAX_WAITING
        if self._num_silent > MAX_SILENT_PERIODS:
            self.abort(broken(f"the peer was silent for {MAX_SILENT_PERIODS * PING_SECONDS:g} s"))

    # The stream.

    def _end(self, error: BlockyardError | None) -> None:
        if self._ended is None:
            self._ended = _Ended(error)
            self._wake()

    @property
    def is_open(self) -> bool:
        """Whether either side may still say something."""
        return self._ended is None

    async def read(self) -> bytes | None:
        """Waits for the next message; None at a good end. Raises BlockyardError: how the stream ended otherwise."""
        while not self._messages:
            if self._ended is not None:
                if self._ended.error is not None:
                    raise self._ended.error
                return None
            self._reader = self._loop.create_future()
            await self._reader
        if len(self._messages) == _MAX_WAITING and self._transport is not None:
            self._transport.resume_reading()
        return self._messages.popleft()

    def send(self, kind: int, payload: bytes = b"") -> None:
        """Sends a frame, if the connection is there; it is on its way unless the other side is slow."""
        self._has_sent = True
        if self._transport is not None:
            self._transport.write(_HEAD.pack(len(payload), kind) + payload)

    async def write(self, message: bytes) -> None:
        """Sends a message; waits while the other side is slow. Raises BlockyardError when the stream has ended."""
        if self._ended is not None:
            raise self._ended.error or broken("the stream has ended")
        self.send(MESSAGE, message)
        if self._writable is not None:
            await asyncio.shield(self._writable)

    def close(self, status: status_pb2.Status | None = None) -> None:
        """Says how the stream ended (None: well), behind all that was sent. The other side closes the connection, so
        that nothing which it still sends makes it lose these words."""
        if self._ended is None and self._transport is not None:
            self.send(END, status.SerializeToString() if status is not None else b"")
            self._end(None)
            self._transport.write_eof()

    def abort(self, error: BlockyardError) -> None:
        """Ends it here and now."""
        self._end(error)
        if self._transport is not None:
            self._transport.abort()
