"""Bidirectional streams between services: over gRPC, or on one machine over a Unix socket beside gRPC's.

A message over gRPC costs two processes some 0.3 ms of CPU time between them, in Python on cold caches; on few cores
that is time of whoever computes. So a service that listens on `unix:PATH` serves its streams at `PATH.streams` too, by
the same messages, ends and errors, and whoever dials takes that where it is there. docs/adr/0008 has the measurements.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import grpc
import grpc.aio

from blockyard import frames
from blockyard.errors import BlockyardError, Reason, from_rpc_error, to_status
from blockyard.rpc import error_of
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from google.protobuf.message import Message

log = EventLogger(__name__)

_EOF: Any = cast("Any", grpc.aio).EOF
_MAX_PATH_BYTES = 107
Answer = TypeVar("Answer", bound="Message", covariant=True)


class Stream(Protocol[Answer]):
    """One stream, as its client sees it."""

    async def write(self, message: Any) -> None:
        """Sends a message; returns when it is on its way. Raises BlockyardError when the stream has ended."""
        ...

    async def read(self) -> Answer | None:
        """Waits for the next message; None at a good end. Raises BlockyardError: why it ended otherwise."""
        ...

    def cancel(self) -> None:
        """Ends it. Idempotent."""
        ...


class _GrpcStream:
    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, message: Any) -> None:
        try:
            await self._call.write(message)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.InvalidStateError:
            raise frames.broken("the stream has ended") from None

    async def read(self) -> Any:
        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        return None if message is _EOF else message

    def cancel(self) -> None:
        self._call.cancel()


class _LocalStream:
    def __init__(self, connection: frames.Connection, answer_type: type[Message]) -> None:
        self._connection = connection
        self._decode = answer_type.FromString

    async def write(self, message: Message) -> None:
        await self._connection.write(message.SerializeToString())

    async def read(self) -> Any:
        payload = await self._connection.read()
        return None if payload is None else self._decode(payload)

    def cancel(self) -> None:
        self._connection.abort(BlockyardError(Reason.CLIENT_CANCELLED, "the stream was cancelled"))


def local_path(address: str) -> str:
    """Where a service of this address serves streams on its machine; empty where it does not."""
    if not address.startswith("unix:"):
        return ""
    path = address.removeprefix("unix:") + ".streams"
    return path if len(os.fsencode(path)) <= _MAX_PATH_BYTES else ""


async def open_stream(
    address: str, method: str, answer_type: type[Answer], over_grpc: Callable[[], Any]
) -> Stream[Answer]:
    """Opens a stream at a service; where that fails, its first use says so.

    Args:
        address: the service's, as gRPC dials it.
        method: `/package.Service/Method`.
        answer_type: what is read.
        over_grpc: calls the same method over gRPC.
    """
    connection = await _dial(local_path(address))
    if connection is None:
        return _GrpcStream(over_grpc())
    connection.send(frames.OPEN, method.encode())
    return cast("Stream[Answer]", _LocalStream(connection, answer_type))


async def _dial(path: str) -> frames.Connection | None:
    if not path:
        return None
    try:
        _, connection = await asyncio.get_running_loop().create_unix_connection(frames.Connection, path)
    except OSError:
        return None
    return connection


class Context:
    """What a handler has of gRPC's context."""

    def __init__(self, connection: frames.Connection) -> None:
        self._connection = connection

    async def write(self, message: Message) -> None:
        """Sends an answer; waits while the other side is slow."""
        await self._connection.write(message.SerializeToString())


Handler = Callable[[AsyncIterator[Any], Any], Awaitable[None]]


class StreamServer:
    """Serves bidirectional methods to this machine: `(request_iterator, context)`, which writes to its context.

    Args:
        handlers: by `/package.Service/Method`, each with the type of its requests.
    """

    def __init__(self, handlers: Mapping[str, tuple[type[Message], Handler]]) -> None:
        self._handlers = handlers
        self._path = ""
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def start(self, address: str) -> None:
        """Listens beside an address that is this process's own; without a Unix socket there, nowhere."""
        self._path = local_path(address)
        if not self._path:
            return
        with suppress(FileNotFoundError):
            # Of a process that was killed.
            os.unlink(self._path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: frames.Connection(self._open), self._path)

    def _open(self, connection: frames.Connection, method: str) -> None:
        task = asyncio.create_task(self._serve(connection, method))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        connection.on_lost = task.cancel

    async def _serve(self, connection: frames.Connection, method: str) -> None:
        """Runs a handler to its end, and says how that was."""
        status = None
        try:
            if method not in self._handlers:
                raise BlockyardError(Reason.UNSUPPORTED_PARAMETER, f"there is no {method}")
            request_type, handler = self._handlers[method]
            await handler(_requests(connection, request_type), Context(connection))
        except BaseException as error:
            told = error_of(error, is_gone=not connection.is_open, method=method)
            if told is None:
                raise
            status = to_status(told)
        finally:
            connection.on_lost = None
            connection.close(status)

    def close(self) -> None:
        """Takes no more streams."""
        if self._server is not None:
            self._server.close()
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            self._server = None

    async def stop(self, seconds: float) -> None:
        """Gives the streams some seconds to end, and ends those that are left with DRAINING."""
        self.close()
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        left = set(self._running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)


async def _requests(connection: frames.Connection, request_type: type[Message]) -> AsyncIterator[Any]:
    # A client that is gone has no more requests.
    with suppress(BlockyardError):
        while (payload := await connection.read()) is not None:
            yield request_type.FromString(payload)
