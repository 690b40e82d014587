"""HTTP between simulated processes: a gateway's ASGI application behind connections of the simulated network.

A connection carries one call. What uvicorn does besides (parsing, keeping connections) is left out.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple

from blockyard.service.roots import start_task
from gateway.fronts.http.server import HttpFront

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from tests.kit.simulation.cluster import Process
    from tests.kit.simulation.network import End

# A client that hears nothing for so long gives its connection up.
IDLE_SECONDS = 20.0


class Call(NamedTuple):
    """What a client sends."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in self.headers.items()],
            "client": ("client", 1),
            "server": ("gateway", 80),
        }


class SimHttpFront(HttpFront):
    """A server of HTTP in a simulated process."""

    def __init__(self, process: Process, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._process = process
        self._address = ""

    def bind(self, host: str, port: int) -> int:
        process = self._process
        address = f"{process.name}:{port}"
        self._address = process.network.listen(process.name, process.owner, address, self._on_connection)
        return port

    def start(self) -> None: ...

    async def stop(self) -> None:
        self._process.network.stop_listening(self._address)

    def _on_connection(self, end: End) -> None:
        end.on_message = lambda call: start_task(self._serve(end, call), "http call")

    async def _serve(self, end: End, call: Call) -> None:
        is_lost = asyncio.Event()
        end.on_lost = lambda _: is_lost.set()
        bodies = [call.body]

        async def receive() -> dict[str, Any]:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await is_lost.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            end.send(message, len(message.get("body", b"")) + 64)

        app: Any = self.app
        await app(call.scope, receive, send)
        end.close()


async def send_call(process: Process, address: str, call: Call) -> AsyncGenerator[dict[str, Any]]:
    """Sends a call, and yields the ASGI messages of its answer. Raises ConnectionError, and TimeoutError."""
    messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    end = process.network.connect(process.name, process.owner, address)
    end.on_message = messages.put_nowait
    end.on_connected = lambda: end.send(call, len(call.body) + 200)
    end.on_lost = lambda _: messages.put_nowait(None)
    try:
        while True:
            message = await asyncio.wait_for(messages.get(), IDLE_SECONDS)
            if message is None:
                raise ConnectionError(f"the connection to {address} was lost")
            yield message
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                return
    finally:
        end.close()


class HttpError(Exception):
    """An answer with another status than 200. `error`: its body's error."""

    def __init__(self, status: int, error: dict[str, Any]) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error


async def read_events(process: Process, address: str, call: Call) -> AsyncGenerator[tuple[str, str]]:
    """Sends a call, and yields the id and the data of each server-sent event. Raises HttpError, and `send_call`'s."""
    status, text = 0, ""
    async with aclosing(send_call(process, address, call)) as messages:
        async for message in messages:
            status = message.get("status", status)
            text += message.get("body", b"").decode()
            while status == 200 and "\n\n" in text:
                event, _, text = text.partition("\n\n")
                fields = dict(line.split(": ", 1) for line in event.split("\n") if not line.startswith(":"))
                if "data" in fields:
                    yield fields.get("id", ""), fields["data"]
    if status != 200:
        raise HttpError(status, json.loads(text)["error"])
