"""Serves applications with uvicorn on a free port, in the test's own event loop; the OpenAI front's are used again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING, Any

import uvicorn

from blockyard.clock import SYSTEM
from gateway.call_context import with_http_call
from gateway.fronts.http.server import make_http_app

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from fastapi import FastAPI


class _CurrentService:
    """Stands where an application has its service, and is the service of the test at hand."""

    service: Any = None
    # Asked for when an application is made, before there is a test.
    clock = SYSTEM

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)


# To make an application of FastAPI takes longer than most tests of it.
_IDLE: list[tuple[FastAPI, _CurrentService]] = []


@contextlib.contextmanager
def openai_app(service: Any) -> Iterator[FastAPI]:
    """Gives the HTTP fronts on a service. It is another test's later: do not change it."""
    if not _IDLE:
        current = _CurrentService()
        _IDLE.append((make_http_app(current), current))  # type: ignore[arg-type]
    app, current = _IDLE.pop()
    current.service = service
    yield app
    _IDLE.append((app, current))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.stopping = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # uvicorn's own waits for a tenth of a second, and then looks ten times a second who is still connected.
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if tasks := set(self.server_state.tasks):
            await asyncio.wait(tasks, timeout=10)

    async def main_loop(self) -> None:
        # uvicorn's own looks ten times a second whether it should end.
        await self.on_tick(0)
        await self.stopping.wait()


@contextlib.asynccontextmanager
async def serve(app: Any) -> AsyncGenerator[str, None]:
    """Gives the URL at which the application answers, wrapped as a gateway wraps it."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(with_http_call(app), log_level="warning", lifespan="off", ws="none"))
    running = asyncio.create_task(server.serve([listener]))
    try:
        await asyncio.wait_for(server.listening.wait(), 10)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.stopping.set()
        await asyncio.wait_for(running, 10)


@contextlib.asynccontextmanager
async def serve_openai(service: Any) -> AsyncGenerator[str, None]:
    """Gives the URL at which the OpenAI front answers from a service."""
    with openai_app(service) as app:
        async with serve(app) as url:
            yield url
