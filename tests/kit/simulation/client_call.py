"""The client's side of a simulated call: what grpc.aio's own call objects expect of gRPC's core."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from grpc._cython import cygrpc

from tests.kit.simulation.streams import CREDIT, END, HEADERS, MESSAGE, RESET, Metadata, Stream, sendable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.kit.simulation.channel import Connector
    from tests.kit.simulation.network import End

OK: int = grpc.StatusCode.OK.value[0]
CANCELLED: int = grpc.StatusCode.CANCELLED.value[0]
_USER_AGENT = ("user-agent", "grpc-python-asyncio/simulated")


class ClientCall:
    """One call. grpc.aio's Python classes hold it in place of their `_AioCall`, whose methods have these names.

    Two things are known here before the application sees them: the server's headers, which a call with one response
    shows together with the response, and its status, which a call with many responses shows once they are read.
    """

    def __init__(self, connector: Connector, method: str, timeout: float | None, wait_for_ready: bool) -> None:
        self.method = method
        self.wait_for_ready = wait_for_ready
        self.metadata: Metadata = ()
        self._loop = asyncio.get_running_loop()
        self._deadline = None if timeout is None else self._loop.time() + timeout
        self._connector = connector
        self._stream: Stream | None = None
        self._on_end: Callable[[], object] = partial(connector.forget, self)
        self._has_many_responses = False
        self._headers: Metadata = ()
        self._received: Any = None
        self._status: Any = None
        self._initial_metadata: Metadata | None = None
        self._is_locally_cancelled = False
        self._done_callbacks: list[Callable[[], object]] = []
        # Set when the call has a stream, or will never have one.
        self._begun = asyncio.Event()
        self._has_headers = asyncio.Event()
        # Set when the received status may be shown.
        self._ended = asyncio.Event()
        self._shows_metadata = asyncio.Event()
        self._shows_status = asyncio.Event()
        self._timer = None if timeout is None else self._loop.call_later(max(timeout, 0.0), self._on_deadline)

    # The state, for grpc.aio's call objects.

    def done(self) -> bool:
        return self._status is not None

    def cancelled(self) -> bool:
        return self.done() and self._status.code() == CANCELLED

    def is_ok(self) -> bool:
        return self.done() and self._status.code() == OK

    def is_locally_cancelled(self) -> bool:
        return self._is_locally_cancelled

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        if self.done():
            callback()
        else:
            self._done_callbacks.append(callback)

    async def status(self) -> Any:
        await self._shows_status.wait()
        return self._status

    async def initial_metadata(self) -> Metadata:
        await self._shows_metadata.wait()
        return self._initial_metadata or ()

    def cancel(self, details: str) -> None:
        if not self._connector.is_gone:
            self._is_locally_cancelled = True
            self._show_status(cygrpc.AioRpcStatus(CANCELLED, details, None, None))
            self.fail(grpc.StatusCode.CANCELLED, details)

    def set_internal_error(self, error: str) -> None:
        self._show_status(cygrpc.AioRpcStatus(grpc.StatusCode.INTERNAL.value[0], "Internal error from Core", (), error))

    # The operations, for grpc.aio's call objects.

    async def unary_unary(self, request: bytes | None, metadata: Metadata, _: object) -> bytes | None:
        await self._begin(metadata)
        self._send_one(request)
        return await self._receive_one()

    async def stream_unary(self, metadata: Metadata, on_sent: Callable[[], None], _: object) -> bytes | None:
        await self._begin(metadata)
        if self._stream is not None:
            on_sent()
            await self._receive_headers()
        response = await self._receive_one()
        # A writer that still waits learns of the end.
        on_sent()
        return response

    async def initiate_unary_stream(self, request: bytes | None, metadata: Metadata, _: object) -> None:
        self._has_many_responses = True
        await self._begin(metadata)
        self._send_one(request)
        await self._receive_headers()

    async def initiate_stream_stream(self, metadata: Metadata, on_sent: Callable[[], None], _: object) -> None:
        self._has_many_responses = True
        await self._begin(metadata)
        on_sent()
        await self._receive_headers()

    async def send_serialized_message(self, message: bytes | None) -> None:
        message = message or b""
        if self._stream is None or not self._is_sendable(message):
            raise cygrpc.ExecuteBatchError("the call is over")
        await self._stream.write(message)

    async def send_receive_close(self) -> None:
        await self._begun.wait()
        if self._stream is not None and not self._stream.is_over:
            self._stream.send(END)
        await asyncio.sleep(0)

    async def receive_serialized_message(self) -> Any:
        if self._stream is None:
            return cygrpc.EOF
        message = await self._stream.read()
        self._end_when_read()
        return cygrpc.EOF if message is None else message

    async def _begin(self, metadata: Metadata) -> None:
        self.metadata = (*sendable(metadata), _USER_AGENT)
        if self._received is None:
            self._connector.start(self)
        await self._begun.wait()

    def _send_one(self, request: bytes | None) -> None:
        # grpc.aio sends nothing for what its serializer fails on.
        request = request or b""
        if self._stream is not None and not self._stream.is_over and self._is_sendable(request):
            self._stream.post(request)
            self._stream.send(END)

    def _is_sendable(self, message: bytes) -> bool:
        limit = self._connector.options.max_send_bytes
        if len(message) > limit:
            details = f"CLIENT: Sent message larger than max ({len(message)} vs. {limit})"
            self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        return len(message) <= limit

    async def _receive_headers(self) -> None:
        await self._has_headers.wait()
        self._show_metadata(self._headers)

    async def _receive_one(self) -> bytes | None:
        await self._ended.wait()
        response = self._stream.take() if self._stream is not None else None
        self._show_metadata(self._headers)
        if not self._is_locally_cancelled:
            self._show_status(self._received)
        return response if self.is_ok() else None

    def _show_metadata(self, metadata: Metadata) -> None:
        if self._initial_metadata is None:
            self._initial_metadata = metadata
            self._shows_metadata.set()

    def _show_status(self, status: Any) -> None:
        self._status = status
        self._show_metadata(())
        self._shows_status.set()
        for callback in self._done_callbacks:
            callback()

    # What comes from the connection.

    def begin(self, end: End, number: int, on_end: Callable[[], None]) -> None:
        """Sends the call on a connection, where it has a number. `on_end`: called when nothing more is received."""
        self._on_end = on_end
        if self._stream is None:
            self._stream = Stream(end, number)
            self._stream.send_headers(self.method, self.metadata, self.time_remaining())
            self._begun.set()
        elif not self._stream.send_again(end, number):
            self.fail(grpc.StatusCode.UNAVAILABLE, "GOAWAY received")

    def begin_again(self) -> None:
        """Goes to another connection: the server has not seen the call."""
        self._on_end = partial(self._connector.forget, self)
        self._connector.start(self)

    def on_frame(self, kind: str, *values: Any) -> None:
        if self._received is not None or self._stream is None:
            return
        self._stream.forget_sent()
        if kind is HEADERS:
            self._on_headers(values[0])
        elif kind is MESSAGE:
            self._on_message(values[0])
        elif kind is CREDIT:
            self._stream.on_credit(values[0])
        elif kind is END:
            self._stream.finish()
            self._on_status(*values)
        elif kind is RESET:
            self._stream.close()
            self._on_status(*values, ())

    def _on_headers(self, metadata: Metadata) -> None:
        self._headers = metadata
        self._has_headers.set()

    def _on_message(self, message: bytes) -> None:
        assert self._stream is not None
        limit = self._connector.options.max_receive_bytes
        if len(message) > limit:
            details = f"CLIENT: Received message larger than max ({len(message)} vs. {limit})"
            self.fail(grpc.StatusCode.RESOURCE_EXHAUSTED, details)
        else:
            self._stream.on_message(message)

    def fail(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call from here: nothing more is received, and nothing more can be read."""
        if self._stream is not None:
            self._stream.reset(CANCELLED, details)
            self._stream.close()
        if self._received is None:
            self._on_status(code.value[0], details, ())
        else:
            self._end_when_read()

    def _on_status(self, code: int, details: str, trailing_metadata: Metadata) -> None:
        self._on_end()
        self._received = cygrpc.AioRpcStatus(code, details, trailing_metadata, f"simulated: {details}")
        self._begun.set()
        self._has_headers.set()
        self._end_when_read()

    def _end_when_read(self) -> None:
        is_read = not self._has_many_responses or self._stream is None or not self._stream.incoming
        if self._received is None or self._ended.is_set() or not is_read:
            return
        self._ended.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._has_many_responses and not self._is_locally_cancelled:
            self._show_status(self._received)

    def _on_deadline(self) -> None:
        # A status that was received and may not be shown yet does not count.
        self._received = None
        self.fail(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
