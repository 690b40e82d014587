"""Reads few long bodies at a time, so that what many of them hold together stays small: tenants take turns.

The others are left in their senders' sockets. A place is held while a body comes, for a second at most: whoever sends
slowly holds up nobody.
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
    """The places of one listener, and the bodies that wait for one."""

    def __init__(self, num_places: int = NUM_PLACES) -> None:
        self._num_free = num_places
        # By tenant, in the order of their turns.
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
    """One request's body, as the application receives it."""

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
        """Receives the next part, when there is a place for it."""
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
        """Releases the place, if it has one. Others continue after this turn's work on the body."""
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
