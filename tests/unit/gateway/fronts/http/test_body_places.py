"""Long bodies: few are read at a time, tenants take turns, and a slow sender holds up nobody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.headers import TENANT_KEY
from gateway.fronts.http import body_places
from gateway.fronts.http.body_places import NUM_PLACES, SHORT_BYTES, BodyPlaces, with_body_places
from tests.kit.waiting import until

if TYPE_CHECKING:
    import pytest
    from starlette.types import Receive, Scope, Send


class Server:
    """An application behind the places, whose bodies come when the test sends them."""

    def __init__(self) -> None:
        self.reading: list[str] = []
        self.read: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self._parts: dict[str, asyncio.Queue[Any]] = {}
        self._app = with_body_places(self._answer)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["more_body"]:
            pass
        self.read.append(scope["path"])

    def call(self, name: str, *, tenant: str = "", length: int | None = 8 * SHORT_BYTES) -> None:
        """Begins a request; without a length it says none."""
        parts = self._parts[name] = asyncio.Queue()
        headers = [(TENANT_KEY.encode(), tenant.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))

        async def receive() -> Any:
            if name not in self.reading:
                self.reading.append(name)
            return await parts.get()

        async def send(_: Any) -> None:
            raise AssertionError

        scope: Any = {"type": "http", "path": name, "headers": headers}
        self.tasks.append(asyncio.create_task(self._app(scope, receive, send)))  # type: ignore[arg-type]

    def send(self, name: str, *, num_bytes: int = 1, more: bool = False) -> None:
        """Sends a part of a body."""
        self._parts[name].put_nowait({"type": "http.request", "body": bytes(num_bytes), "more_body": more})

    async def settle(self) -> list[str]:
        """Lets everything happen that can; returns which bodies have begun to be read since."""
        before = len(self.reading)
        for _ in range(20):
            await asyncio.sleep(0)
        return self.reading[before:]


async def test_few_long_bodies_are_read_at_a_time() -> None:
    server = Server()
    names = [str(number) for number in range(NUM_PLACES + 2)]
    for name in names:
        server.call(name)
    assert await server.settle() == names[:NUM_PLACES]
    server.send("0", more=True)
    assert await server.settle() == [], "it is not read yet"
    server.send("0")
    assert await server.settle() == [names[NUM_PLACES]]
    assert server.read == ["0"]


async def test_a_short_body_needs_no_place() -> None:
    server = Server()
    for number in range(NUM_PLACES):
        server.call(str(number))
    await server.settle()
    server.call("short", length=SHORT_BYTES)
    server.call("none", length=0)
    assert await server.settle() == ["short", "none"]


async def test_a_body_that_says_no_length_is_long_once_it_is() -> None:
    server = Server()
    server.call("says nothing", length=None)
    for number in range(NUM_PLACES):
        server.call(str(number))
    await server.settle()
    server.send("says nothing", num_bytes=SHORT_BYTES + 1, more=True)
    server.send("says nothing")
    await server.settle()
    assert server.read == [], "it waits for a place"
    server.send("2")
    await server.settle()
    assert server.read == ["2", "says nothing"]


async def test_tenants_take_turns() -> None:
    server = Server()
    for number in range(NUM_PLACES + 3):
        server.call(f"a{number}", tenant="a")
    await server.settle()
    server.call("b", tenant="b")
    await server.settle()
    for number in range(3):
        server.send(f"a{number}")
        await server.settle()
    assert server.reading[NUM_PLACES:] == ["a4", "b", "a5"]


async def test_who_sends_slowly_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_places, "MAX_SECONDS", 0.0)
    server = Server()
    names = [str(number) for number in range(NUM_PLACES + 2)]
    for name in names:
        server.call(name)
        await server.settle()
    await until(lambda: server.reading == names)
    for name in names:
        server.send(name)
    await asyncio.gather(*server.tasks)
    assert sorted(server.read) == names


async def test_who_leaves_takes_no_place_along() -> None:
    server = Server()
    for number in range(NUM_PLACES + 3):
        server.call(str(number))
    await server.settle()
    # One is being read, and two of the others wait.
    server.tasks[0].cancel()
    server.tasks[NUM_PLACES].cancel()
    await server.settle()
    server.send("1")
    await server.settle()
    assert server.reading[NUM_PLACES:] == [str(NUM_PLACES + 1), str(NUM_PLACES + 2)]


async def test_a_place_that_is_given_to_who_leaves_just_then_goes_on() -> None:
    places = BodyPlaces(1)
    await places.take("")
    leaving, staying = (asyncio.create_task(places.take("")) for _ in range(2))
    await asyncio.sleep(0)
    places.give_back()
    leaving.cancel()
    async with asyncio.timeout(10):
        await staying
    assert leaving.cancelled()


async def test_what_is_no_request_passes() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    await with_body_places(app)({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert seen == ["lifespan"]
