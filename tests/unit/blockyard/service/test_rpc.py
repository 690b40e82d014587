"""Servers and channels as all processes make them, over real sockets."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.errors import BlockyardError, Reason, Violation, from_rpc_error
from blockyard.service import servers as rpc
from blockyard.service.health import add_health
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

SERVING = health_pb2.HealthCheckResponse.SERVING


class Handlers(worker_pb2_grpc.WorkerServiceServicer):
    """One handler of each of the shapes that our services have; `act` is what they do."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act
        self.closed = asyncio.Event()

    async def Shutdown(self, request: Any, context: Any) -> Any:
        await self._act()
        return worker_pb2.ShutdownResponse()

    async def LoadModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield worker_pb2.LoadModelResponse()
            await self._act()
            yield worker_pb2.LoadModelResponse(progress=worker_pb2.LoadProgress(done_bytes=1))
        finally:
            self.closed.set()

    async def ExecuteModel(self, requests: Any, context: Any) -> None:
        async for request in requests:
            await context.write(worker_pb2.ExecuteModelResponse(step_id=request.step_id))
            await self._act()


@asynccontextmanager
async def serving(act: Callable[[], Any]) -> AsyncIterator[tuple[Any, Handlers, grpc.aio.Server]]:
    server = rpc.make_server(rpc.INTERNAL_MESSAGE_BYTES, ["blockyard.worker.v1.WorkerService"])
    handlers = Handlers(act)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(handlers, server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
        yield worker_pb2_grpc.WorkerServiceStub(channel), handlers, server
    await server.stop(0)


async def nothing() -> None:
    pass


def raising(error: BaseException) -> Callable[[], Any]:
    async def act() -> None:
        raise error

    return act


async def fail(call: Any) -> BlockyardError:
    """Runs a call that has to fail, and decodes how."""
    with pytest.raises(grpc.RpcError) as caught:
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await asyncio.wait_for(call, 10)
        else:
            async with asyncio.timeout(10):
                while await call.read() is not grpc.aio.EOF:
                    pass
    return from_rpc_error(caught.value)


def calls(stub: Any) -> list[Any]:
    steps = iter([worker_pb2.ExecuteModelRequest(step_id=1)])
    return [
        stub.Shutdown(worker_pb2.ShutdownRequest()),
        stub.LoadModel(worker_pb2.LoadModelRequest()),
        stub.ExecuteModel(steps),
    ]


async def test_every_shape_of_handler_answers() -> None:
    async with serving(nothing) as (stub, _, _):
        assert await stub.Shutdown(worker_pb2.ShutdownRequest()) == worker_pb2.ShutdownResponse()
        loaded = [message.progress.done_bytes async for message in stub.LoadModel(worker_pb2.LoadModelRequest())]
        assert loaded == [0, 1]
        steps = [worker_pb2.ExecuteModelRequest(step_id=number) for number in (1, 2)]
        assert [message.step_id async for message in stub.ExecuteModel(iter(steps))] == [1, 2]


@pytest.mark.parametrize("reason", list(Reason))
async def test_every_reason_crosses_the_wire(reason: Reason) -> None:
    error = BlockyardError(reason, "why: é\n", (Violation("n", "too many"),), 1.5, {"limit": "64"})
    async with serving(raising(error)) as (stub, _, _):
        for call in calls(stub):
            assert await fail(call) == error


async def test_the_largest_error_crosses_the_wire() -> None:
    wide = "\U0001f600" * 1000
    error = BlockyardError(Reason.BUG, wide, tuple(Violation(wide, wide) for _ in range(50)), 1.0, {wide: wide})
    async with serving(raising(error)) as (stub, _, _):
        # More often than once: over its soft limit gRPC drops trailers by chance.
        for _ in range(20):
            told = await fail(stub.Shutdown(worker_pb2.ShutdownRequest()))
            assert told.reason is Reason.BUG
            assert wide.startswith(told.message)
            assert len(told.violations) >= 4


async def test_what_nobody_expected_becomes_a_bug_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(raising(ZeroDivisionError("secret"))) as (stub, _, _):
        for call in calls(stub):
            error = await fail(call)
            assert error.reason is Reason.BUG
            assert "secret" not in error.message
    assert [record.message for record in caplog.records] == ["a handler failed"] * 3
    assert "secret" in caplog.text


async def test_a_handler_that_is_cancelled_by_itself_tells_its_client() -> None:
    async with serving(raising(asyncio.CancelledError())) as (stub, _, _):
        for call in calls(stub):
            error = await fail(call)
            assert (error.reason, error.retry_after_seconds) == (Reason.DRAINING, 1.0)


async def test_a_server_that_stops_tells_its_clients(caplog: pytest.LogCaptureFixture) -> None:
    forever = asyncio.Event()
    async with serving(forever.wait) as (stub, _, server):
        streams = [stub.LoadModel(worker_pb2.LoadModelRequest()) for _ in range(3)]
        for stream in streams:
            await stream.read()
        stopping = asyncio.create_task(server.stop(0))
        errors = await asyncio.gather(*(fail(stream) for stream in streams))
        await stopping
    assert {error.code for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert caplog.records == []


async def test_a_client_that_leaves_closes_its_handler() -> None:
    forever = asyncio.Event()
    async with serving(forever.wait) as (stub, handlers, _):
        stream = stub.LoadModel(worker_pb2.LoadModelRequest())
        await stream.read()
        stream.cancel()
        await asyncio.wait_for(handlers.closed.wait(), 10)


async def test_a_client_that_does_not_read_closes_its_handler_when_it_leaves() -> None:
    big = worker_pb2.LoadModelResponse(loaded=worker_pb2.LoadedModel(architecture="x" * 1_000_000))

    class Endless(Handlers):
        async def LoadModel(self, request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                while True:
                    yield big
                    sent.set()
            finally:
                self.closed.set()

    sent = asyncio.Event()
    server = rpc.make_server(rpc.INTERNAL_MESSAGE_BYTES, [])
    handlers = Endless(nothing)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(handlers, server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
        stream = worker_pb2_grpc.WorkerServiceStub(channel).LoadModel(worker_pb2.LoadModelRequest())
        await stream.read()
        await asyncio.wait_for(sent.wait(), 10)
        stream.cancel()
        await asyncio.wait_for(handlers.closed.wait(), 10)
    await server.stop(0)


async def test_an_unknown_method_is_a_feature_that_is_not_there() -> None:
    server = rpc.make_server(1000, [])
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/blockyard.worker.v1.WorkerService/Fly")(b"")
        assert (await fail(call)).reason is Reason.FEATURE_DISABLED
    await server.stop(0)


async def test_reflection_names_the_services() -> None:
    server = rpc.make_server(PUBLIC_MESSAGE_BYTES, ["blockyard.worker.v1.WorkerService"])
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([ask]))]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"blockyard.worker.v1.WorkerService", "grpc.health.v1.Health"} <= names
    await server.stop(0)


async def test_a_message_above_the_limit_has_a_reason() -> None:
    server = rpc.make_server(1000, [])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Handlers(nothing), server)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
        request = worker_pb2.ShutdownRequest(reason="x" * 2000)
        error = await fail(worker_pb2_grpc.WorkerServiceStub(channel).Shutdown(request))
        assert error.reason is Reason.MESSAGE_TOO_LARGE
    await server.stop(0)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::1]"])
async def test_a_taken_port_is_an_error(host: str) -> None:
    first, second = rpc.make_server(1000, []), rpc.make_server(1000, [])
    port = rpc.bind(first, f"{host}:0")
    assert port > 0
    with pytest.raises(rpc.PortTaken, match=str(port)):
        rpc.bind(second, f"{host}:{port}")
    await first.stop(0)
    await second.stop(0)


async def test_a_host_of_somewhere_else_is_an_error() -> None:
    server = rpc.make_server(1000, [])
    with pytest.raises(rpc.PortTaken, match=r"192\.0\.2\.1"):
        rpc.bind(server, "192.0.2.1:0")
    await server.stop(0)


async def test_a_unix_socket(tmp_path: Path) -> None:
    server = rpc.make_server(1000, [])
    add_health(server, lambda: True, lambda: True)
    rpc.bind(server, f"unix:{tmp_path}/s")
    await server.start()
    async with rpc.internal_channel(f"unix:{tmp_path}/s") as channel:
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status == SERVING
    await server.stop(0)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.write_eof()


async def test_a_unix_socket_that_somebody_listens_on_is_taken_and_stays_theirs(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    first, second = (rpc.make_server(PUBLIC_MESSAGE_BYTES, []) for _ in range(2))
    rpc.bind(first, address)
    await first.start()
    with pytest.raises(rpc.PortTaken, match="another process listens there"):
        rpc.bind(second, address)
    async with rpc.internal_channel(address) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
    await first.stop(None)
    await second.stop(None)


async def test_the_socket_of_a_process_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(f"{tmp_path}/s")
        dead.listen()
    assert (tmp_path / "s").is_socket()
    server = rpc.make_server(PUBLIC_MESSAGE_BYTES, [])
    rpc.bind(server, f"unix:{tmp_path}/s")
    await server.start()
    async with rpc.internal_channel(f"unix:{tmp_path}/s") as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
    await server.stop(None)


async def test_a_unix_socket_that_cannot_be_made_says_what_it_needs(tmp_path: Path) -> None:
    server = rpc.make_server(PUBLIC_MESSAGE_BYTES, [])
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing" / "s", tmp_path / ("x" * 120), tmp_path / "file"):
        with pytest.raises(rpc.PortTaken, match=r"folder.*107 bytes"):
            rpc.bind(server, f"unix:{path}")
    assert (tmp_path / "file").is_file()
    await server.stop(None)


async def test_a_port_that_no_port_is_is_an_error() -> None:
    server = rpc.make_server(PUBLIC_MESSAGE_BYTES, [])
    with pytest.raises(rpc.PortTaken, match="99999"):
        rpc.bind(server, "127.0.0.1:99999")
    await server.stop(None)


async def test_a_peer_that_is_slow_to_answer_is_still_connected_to(unused_tcp_port: int) -> None:
    """Its first answer takes longer than the longest back-off; a try to connect must not be given up before."""
    server = rpc.make_server(1000, [])
    add_health(server, lambda: True, lambda: True)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(1.2)
        onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(pump(reader, onward_writer), pump(onward_reader, writer))
        onward_writer.close()
        writer.close()

    slow = await asyncio.start_server(relay, "127.0.0.1", unused_tcp_port)
    async with rpc.internal_channel(f"127.0.0.1:{unused_tcp_port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=5
        )
        assert (await check).status == SERVING
    await server.stop(0)
    slow.close()
    await slow.wait_closed()


def test_a_proxy_of_the_environment_is_not_asked_for_our_own_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")

    async def check() -> None:
        server = rpc.make_server(1000, [])
        add_health(server, lambda: True, lambda: True)
        port = rpc.bind(server, "127.0.0.1:0")
        await server.start()
        async with rpc.internal_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == SERVING
        await server.stop(0)

    asyncio.run(check())


async def test_a_peer_that_freezes_is_noticed_within_twice_the_keepalive() -> None:
    server = rpc.make_server(1000, [])
    add_health(server, lambda: True, lambda: True)
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    pumps: list[asyncio.Task[None]] = []
    over = asyncio.Event()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        pumps.extend([asyncio.create_task(pump(reader, back)), asyncio.create_task(pump(there, writer))])
        await over.wait()
        writer.close()
        back.close()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
    options = rpc.channel_options(1000, keepalive_seconds=1.0, use_proxy=False)
    async with grpc.aio.insecure_channel(address, options) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        # Nothing is passed on any more, and the connection stays open.
        for task in pumps:
            task.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(watch.read(), 10)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    over.set()
    proxy.close()
    await proxy.wait_closed()
    await server.stop(0)
