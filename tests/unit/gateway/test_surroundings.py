"""All parts of a gateway have the clock and the transport that it was given; its HTTP can be called without a port."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from blockyard.clock import SYSTEM
from gateway.fronts.http.server import HttpFront
from gateway.server import Parts, Server
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.surroundings import NotedTransport, find_strays, make_clock
from tests.unit.gateway.harness import configuration, demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        yield scheduler


class PortlessFront(HttpFront):
    """Is called as an application, and listens nowhere."""

    def bind(self, host: str, port: int) -> int:
        return port

    def start(self) -> None: ...

    async def stop(self) -> None: ...


async def test_no_part_has_the_systems(scheduler: FakeScheduler) -> None:
    transport, fronts = NotedTransport(), list[HttpFront]()

    def make_front(*arguments: object, **options: object) -> HttpFront:
        fronts.append(PortlessFront(*arguments, **options))  # type: ignore[arg-type]
        return fronts[-1]

    settings = configuration(scheduler)
    settings = replace(settings, service=replace(settings.service, gateway_health_port=-1, gateway_metrics_port=-1))
    threads = threading.enumerate()
    gateway = Server(settings, clock=make_clock(), transport=transport, parts=Parts(make_front=make_front))
    await gateway.start()
    try:
        [model] = gateway.generation.served_models
        await model.link.wait_until(lambda: model.link.is_ready)
        asgi = httpx.ASGITransport(fronts[-1].app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=asgi, base_url="http://gateway") as client:
            answer = await client.post("/v1/completions", json={"prompt": "Once upon a time", "max_tokens": 4})
            assert answer.json()["usage"]["completion_tokens"] == 4
        assert not find_strays(gateway, transport)
        assert len(transport.servers) == 3
        # For calls, and for the stream.
        assert len(transport.channels) == 2
        # Threads of earlier tests may end meanwhile.
        assert set(threading.enumerate()) <= set(threads)
        # The search sees what a part has.
        gateway.generation.clock = SYSTEM
        assert any(way.startswith("Server > GenerationService > Clock") for way in find_strays(gateway, transport))
    finally:
        await gateway.stop()
