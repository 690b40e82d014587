"""Health as probes see it: alive and ready, from a thread of its own and on a service's own port."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.service import servers as rpc
from blockyard.service.health import HealthServer, Heartbeat, add_health

if TYPE_CHECKING:
    from collections.abc import Callable

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(port: int, service: str) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return (
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status
        )


def eventually(holds: Callable[[], bool]) -> None:
    """Polls a health server, which polls its probes: there is no event to wait for."""
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


async def test_a_heartbeat_counts_the_tasks_beside_it() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.num_tasks() == 0
    heartbeat.start()
    stopping = asyncio.Event()
    before = await asyncio.to_thread(heartbeat.num_tasks)
    task = asyncio.create_task(stopping.wait())
    assert await asyncio.to_thread(heartbeat.num_tasks) == before + 1
    stopping.set()
    await task
    assert await asyncio.to_thread(heartbeat.num_tasks) == before


def test_liveness_fails_when_the_loop_is_blocked_and_comes_back() -> None:
    blocked, free = threading.Event(), threading.Event()
    heartbeat = Heartbeat(max_age_seconds=0.3, interval_seconds=0.02)
    health = HealthServer(heartbeat.is_alive, lambda: True, period_seconds=0.01)
    stopped: list[asyncio.Event] = []

    async def main() -> None:
        heartbeat.start()
        stopped.append(asyncio.Event())
        await asyncio.to_thread(blocked.wait, 10)
        free.wait(10)
        await stopped[0].wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    port = health.start("127.0.0.1:0")
    assert health_of(port, "liveness") == SERVING
    blocked.set()
    eventually(lambda: health_of(port, "liveness") == NOT_SERVING)
    assert health_of(port, "readiness") == SERVING
    free.set()
    eventually(lambda: health_of(port, "liveness") == SERVING)
    loop.call_soon_threadsafe(stopped[0].set)
    thread.join(10)
    loop.close()
    health.stop()


def test_health_follows_readiness_and_survives_a_broken_probe(caplog: pytest.LogCaptureFixture) -> None:
    state: list[Any] = [True]

    def is_ready() -> bool:
        if isinstance(state[0], Exception):
            raise state[0]
        return state[0]

    health = HealthServer(lambda: True, is_ready, period_seconds=0.01)
    port = health.start("127.0.0.1:0")
    for service in ("", "readiness", "liveness"):
        assert health_of(port, service) == SERVING
    state[0] = RuntimeError("broken")
    eventually(lambda: health_of(port, "") == NOT_SERVING)
    assert health_of(port, "liveness") == SERVING
    state[0] = True
    eventually(lambda: health_of(port, "readiness") == SERVING)
    assert "a health probe failed" in caplog.text
    health.stop()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


async def test_all_names_are_listed(caplog: pytest.LogCaptureFixture) -> None:
    probes: Any = (lambda: True, lambda: False, {"other": lambda: True})
    statuses = {"": NOT_SERVING, "liveness": SERVING, "readiness": NOT_SERVING, "other": SERVING}
    alone = HealthServer(*probes)
    server = grpc.aio.server()
    is_live, is_ready, others = probes
    add_health(server, is_ready, is_live, others)
    ports = [alone.start("127.0.0.1:0"), server.add_insecure_port("127.0.0.1:0")]
    await server.start()
    for port in ports:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            listed = (await stub.List(health_pb2.HealthListRequest())).statuses
            assert {name: response.status for name, response in listed.items()} == statuses
    await server.stop(None)
    alone.stop()
    assert not caplog.records


def test_a_health_server_that_never_started_can_be_stopped() -> None:
    HealthServer(lambda: True, lambda: True).stop()


def test_a_taken_port_of_health_is_an_error() -> None:
    first, second = (HealthServer(lambda: True, lambda: True) for _ in range(2))
    port = first.start("127.0.0.1:0")
    with pytest.raises(rpc.PortTaken):
        second.start(f"127.0.0.1:{port}")
    first.stop()
    second.stop()


async def test_health_on_a_services_own_port() -> None:
    ready = False
    server = rpc.make_server(1000, [])
    add_health(server, lambda: ready, lambda: True)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))).status == SERVING
        ready = True
        assert (await asyncio.wait_for(watch.read(), 10)).status == SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="lunch"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="lunch"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()
        unknown.cancel()
    await server.stop(0)
