"""A process whose event loop is busy is slow, not dead: what gRPC's own threads do meanwhile."""

from __future__ import annotations

import asyncio
import struct
from collections import Counter
from contextlib import suppress

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.service import grpc_wakeups
from blockyard.service import servers as rpc
from tests.kit.fakes.stalled_server import StalledServer, stalled_server

# Events of gRPC that wake the loop; what the socket between them holds is some 280 bytes.
NUM_STREAMS = 700
# More than gRPC lets wait by itself, which is a thousand to three thousand.
NUM_CALLS = 3_500
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, ACKNOWLEDGED = 4, 6, 1


def frame(kind: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 that is about the connection."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4) + payload


async def ping(port: int) -> None:
    """Connects, and waits for the answer to a ping."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS) + frame(PING, b"12345678"))
    kind = flags = 0
    while (kind, flags) != (PING, ACKNOWLEDGED):
        head = await reader.readexactly(9)
        kind, flags = head[3], head[4]
        await reader.readexactly(int.from_bytes(head[:3]))
    writer.close()


async def leave_events(server: StalledServer) -> None:
    """Has a server stand still, and hundreds of its calls end meanwhile."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(NUM_STREAMS)]
        await asyncio.gather(*(call.read() for call in calls))
        await server.stall()
        for call in calls:
            call.cancel()


async def test_a_ping_is_answered_while_the_loop_stands_still_and_events_pile_up() -> None:
    async with stalled_server() as server:
        await leave_events(server)
        async with asyncio.timeout(10):
            await ping(server.port)


async def test_all_that_came_while_the_loop_stood_still_is_done_when_it_turns_again() -> None:
    async with stalled_server() as server:
        await leave_events(server)
        server.go_on()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert (await check).status == health_pb2.HealthCheckResponse.SERVING


async def test_no_call_of_thousands_that_come_at_once_is_cancelled() -> None:
    ends = Counter[grpc.StatusCode]()

    async def check(stub: health_pb2_grpc.HealthStub) -> None:
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        with suppress(grpc.aio.AioRpcError):
            await call
        ends[await call.code()] += 1

    async with (
        stalled_server() as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        await check(stub)
        await server.stall()
        checks = asyncio.gather(*(check(stub) for _ in range(NUM_CALLS)))
        # The loop of this test has started them all when it comes here; the server's turns again when they are there.
        await ping(server.port)
        server.go_on()
        await checks
    assert ends == {grpc.StatusCode.OK: NUM_CALLS + 1}
    assert rpc.MAX_CONCURRENT_STREAMS > NUM_CALLS


def test_a_byte_stays_for_the_events_behind_one_that_fails() -> None:
    """The loop reads one, takes events until one raises, and has to be woken for the rest."""
    read_end, write_end = grpc_wakeups._make_pair()
    with read_end, write_end:
        write_end.send(b"123")
        assert [read_end.recv(1) for _ in range(3)] == [b"1", b"2", b"3"]
