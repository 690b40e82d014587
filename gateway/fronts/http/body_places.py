"""Limits how many long bodies are read at a time, so that many of them do not fill the memory. Tenants take turns.

The other bodies stay in their sockets. A body holds its place while it arrives, but for a second at most: a slow sender
does not block others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from blockyard.headers import TENANT_KEY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SHORT_BYTES = 2**20
"""A body of at most this many bytes needs no place."""
NUM_PLACES = 4
MAX_SECONDS = 1.0


class BodyPlaces:
    """The places for long bodies of one listener, and the bodies that wait for a place."""

    def __init__(self, num_places: int = NUM_PLACES) -> None:
        self._num_free = num_places
        # The waiting bodies by tenant, in the order of the tenants' turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def take(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1


class _Body:
    """The body of one request while the application receives it."""

    def __init__(self, places: BodyPlaces, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self._tenant = headers.get(TENANT_KEY, "")
        length = headers.get("content-length", "")
        self._is_long = length.isascii() and length.isdecimal() and int(length) > SHORT_BYTES
        self._places = places
        self._receive = receive
        self._num_bytes = 0
        self._has_had_place = False
        self._expiry: asyncio.TimerHandle | None = None

    async def receive(self) -> Message:
        """Receives the next part of the body; a long body first waits for a place."""
        if self._is_long and not self._has_had_place:
            self._has_had_place = True
            await self._places.take(self._tenant)
            self._expiry = asyncio.get_running_loop().call_later(MAX_SECONDS, self.end)
        message = await self._receive()
        self._num_bytes += len(message.get("body", b""))
        self._is_long = self._is_long or self._num_bytes > SHORT_BYTES
        if not message.get("more_body", False):
            self.end()
        return message

    def end(self) -> None:
        """Releases the body's place, if it has one. Waiting bodies continue in a later turn of the event loop."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
            self._places.give_back()


def with_body_places(app: ASGIApp) -> ASGIApp:
    """Wraps an application so that few of its long bodies are read at a time."""
    places = BodyPlaces()

    async def bound(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        body = _Body(places, scope, receive)
        try:
            await app(scope, body.receive, send)
        finally:
            body.end()

    return bound
