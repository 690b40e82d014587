"""Each gRPC call is counted once, by the status that its client got; what no service has is no label."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.errors import BlockyardError, Reason
from blockyard.service.health import add_health
from blockyard.service.interceptors import CallCounter
from blockyard.service.metrics import Counter
from blockyard.service.servers import bind, make_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

Counts = dict[tuple[str, ...], float]


class Service:
    """Methods of all four kinds, on bytes."""

    def __init__(self) -> None:
        self.calls = Counter()
        self.errors: list[Reason] = []
        self.counted = asyncio.Event()

    @property
    def counts(self) -> Counts:
        return dict(self.calls.samples())

    def note(self, reason: Reason) -> None:
        self.errors.append(reason)
        self.counted.set()

    async def echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def fail(self, request: bytes, context: Any) -> bytes:
        if request == b"bug":
            raise ValueError("a bug")
        raise BlockyardError(Reason(request.decode()), "no")

    async def repeat(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(3):
            yield request
        if request == b"endless":
            await asyncio.Event().wait()

    async def write(self, request: bytes, context: Any) -> None:
        await context.write(request)
        if request == b"endless":
            await asyncio.Event().wait()

    async def write_on(self, request: bytes, context: Any) -> None:
        await context.write(request)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        # As where a message is on its way when the client goes.
        await context.write(request)

    async def join(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def mirror(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    @property
    def handlers(self) -> dict[str, Any]:
        return {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "Fail": grpc.unary_unary_rpc_method_handler(self.fail),
            "Repeat": grpc.unary_stream_rpc_method_handler(self.repeat),
            "Write": grpc.unary_stream_rpc_method_handler(self.write),
            "WriteOn": grpc.unary_stream_rpc_method_handler(self.write_on),
            "Join": grpc.stream_unary_rpc_method_handler(self.join),
            "Mirror": grpc.stream_stream_rpc_method_handler(self.mirror),
        }


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Service, grpc.aio.Channel]]:
    service = Service()
    server = make_server(PUBLIC_MESSAGE_BYTES, [], interceptors=[CallCounter(service.calls, service.note)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.v1.Test", service.handlers),))
    add_health(server, lambda: True, lambda: True)
    address = f"127.0.0.1:{bind(server, '127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield service, channel
        finally:
            await server.stop(0)


async def several(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def test_calls_of_every_kind_are_counted() -> None:
    async with serving() as (service, channel):
        assert await channel.unary_unary("/test.v1.Test/Echo")(b"a") == b"a"
        assert await channel.unary_unary("/test.v1.Test/Echo")(b"b") == b"b"
        assert [part async for part in channel.unary_stream("/test.v1.Test/Repeat")(b"a")] == [b"a"] * 3
        assert [part async for part in channel.unary_stream("/test.v1.Test/Write")(b"a")] == [b"a"]
        assert await channel.stream_unary("/test.v1.Test/Join")(several(b"a", b"b")) == b"ab"
        assert [part async for part in channel.stream_stream("/test.v1.Test/Mirror")(several(b"a", b"b"))] == [
            b"a",
            b"b",
        ]
    assert service.counts == {
        ("test.v1.Test/Echo", "OK"): 2,
        ("test.v1.Test/Repeat", "OK"): 1,
        ("test.v1.Test/Write", "OK"): 1,
        ("test.v1.Test/Join", "OK"): 1,
        ("test.v1.Test/Mirror", "OK"): 1,
    }
    assert service.errors == []


@pytest.mark.parametrize(
    ("request_", "reason", "code"),
    [
        (b"QUEUE_FULL", Reason.QUEUE_FULL, "RESOURCE_EXHAUSTED"),
        (b"FIELD_INVALID", Reason.FIELD_INVALID, "INVALID_ARGUMENT"),
        (b"bug", Reason.BUG, "INTERNAL"),
    ],
)
async def test_an_error_is_counted_by_what_its_client_is_told(request_: bytes, reason: Reason, code: str) -> None:
    async with serving() as (service, channel):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_unary("/test.v1.Test/Fail")(request_)
        assert raised.value.code().name == code
    assert service.counts == {("test.v1.Test/Fail", code): 1}
    assert service.errors == [reason]


@pytest.mark.parametrize("method", ["Repeat", "Write", "WriteOn"])
async def test_a_call_that_its_client_leaves_is_a_cancelled_one(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (service, channel):
        call = channel.unary_stream(f"/test.v1.Test/{method}")(b"endless")
        await call.read()
        call.cancel()
        await asyncio.wait_for(service.counted.wait(), 10)
    assert service.counts == {(f"test.v1.Test/{method}", "CANCELLED"): 1}
    assert service.errors == [Reason.CLIENT_CANCELLED]
    assert not caplog.records


async def test_a_server_that_stops_counts_the_calls_that_it_ends() -> None:
    async with serving() as (service, channel):
        call = channel.unary_stream("/test.v1.Test/Repeat")(b"endless")
        await call.read()
    await asyncio.wait_for(service.counted.wait(), 10)
    assert len(service.errors) == 1
    assert service.errors[0] in (Reason.DRAINING, Reason.CLIENT_CANCELLED)


async def test_health_and_what_no_service_has_are_not_counted() -> None:
    async with serving() as (service, channel):
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        for method in ("/test.v1.Test/None", "/other.v1.Other/Echo"):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(method)(b"a")
            assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert service.counts == {}
