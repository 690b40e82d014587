"""Reads a call's body within limits, watches its client, and streams server-sent events."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from fastapi import Request, Response
from starlette.requests import ClientDisconnect

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

    from starlette.types import Receive, Scope, Send

T = TypeVar("T")
# A body that is too long is read up to this size, so that its sender gets the answer instead of a broken pipe.
MAX_DISCARDED_BYTES = 4 * PUBLIC_MESSAGE_BYTES

STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


async def read_body(request: Request) -> bytes:
    """Reads a body of at most 16 MiB; raises BlockyardError MESSAGE_TOO_LARGE or CLIENT_CANCELLED."""
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes <= PUBLIC_MESSAGE_BYTES:
                parts.append(part)
            elif num_bytes > MAX_DISCARDED_BYTES:
                break
    except ClientDisconnect:
        raise client_gone() from None
    if num_bytes > PUBLIC_MESSAGE_BYTES:
        raise BlockyardError(Reason.MESSAGE_TOO_LARGE, f"the body has more than {PUBLIC_MESSAGE_BYTES} bytes")
    return b"".join(parts)


def client_gone() -> BlockyardError:
    """Makes the error for a call whose client has left."""
    return BlockyardError(Reason.CLIENT_CANCELLED, "the client has closed the connection")


class Connection:
    """Notices when a call's client leaves. Created after the body is read; its creator calls `aclose`."""

    def __init__(self, receive: Receive) -> None:
        self._left = asyncio.create_task(_wait_until_left(receive))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine for the client. If the client leaves, cancels it and raises CLIENT_CANCELLED."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise client_gone()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            # Break the reference cycle of the task, its error and this frame, which would keep the call's objects
            # alive until a garbage collection.
            del task

    async def aclose(self) -> None:
        self._left.cancel()
        with suppress(asyncio.CancelledError):
            await self._left


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ServerSentEvent(NamedTuple):
    """A server-sent event. `id`: the position after it, for resuming; `event`: its kind. Both may be empty."""

    data: str
    id: str = ""
    event: str = ""

    def encode(self) -> bytes:
        kind = f"event: {self.event}\n" if self.event else ""
        head = f"id: {self.id}\n" if self.id else ""
        return f"{kind}{head}data: {self.data}\n\n".encode()


class EventStream(Response):
    """An answer that streams server-sent events. If the client leaves, it closes the source of the events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[ServerSentEvent, None],
        connection: Connection,
        resources: AsyncExitStack,
        headers: dict[str, str],
    ) -> None:
        super().__init__(headers={**STREAM_HEADERS, **headers})
        # A stream has no content length.
        del self.headers["content-length"]
        self._events = events
        self._connection = connection
        # Resources to close with the stream, even if it never begins.
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._connection.run(self._send_all(send))
        except BlockyardError as error:
            if error.reason is not Reason.CLIENT_CANCELLED:
                raise
        finally:
            await self._resources.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # Close the generator here, not by the garbage collector: closing it ends the request.
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
