"""A stream is the same over gRPC and over a socket beside it: order, ends, errors, cancels, slow readers."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from blockyard import frames, rpc, streams
from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason
from blockyard.scheduler.v1 import scheduler_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

METHOD = "/test.Service/Talk"
SECONDS = 20.0
Request, Response = scheduler_pb2.AttachRequest, scheduler_pb2.AttachResponse


def ask(text: str) -> scheduler_pb2.AttachRequest:
    return Request(hello=scheduler_pb2.Hello(gateway_id=text))


class Service:
    """Does what it is told by requests, and notes what became of its calls."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.num_written = 0

    async def talk(self, requests: AsyncIterator[scheduler_pb2.AttachRequest], context: Any) -> None:
        try:
            async for request in requests:
                await self._do(request.hello.gateway_id, context)
                if request.hello.gateway_id == "end":
                    return
        finally:
            self.ended.set()

    async def _do(self, what: str, context: Any) -> None:
        if what == "refuse":
            raise BlockyardError(Reason.QUEUE_FULL, "too many", retry_after_seconds=2.0, metadata={"key": "value"})
        if what == "break":
            raise ValueError("a bug")
        if what == "flood":
            await self._flood(context)
        elif what != "end":
            await context.write(Response(readiness=scheduler_pb2.Readiness(message=what)))

    async def _flood(self, context: Any) -> None:
        """Writes more than anything between the two can hold."""
        message = Response(readiness=scheduler_pb2.Readiness(message="x" * 100_000))
        for _ in range(200):
            await context.write(message)
            self.num_written += 1


class Running:
    """A service at an address, over gRPC and, if `local`, beside it."""

    def __init__(self, address: str, service: Service) -> None:
        self.address = address
        self.service = service
        self.beside = streams.StreamServer({METHOD: (Request, service.talk)})
        self.server = rpc.make_server(1 << 24, [])
        handler = grpc.stream_stream_rpc_method_handler(service.talk, Request.FromString, Response.SerializeToString)
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Talk": handler}),))
        self.channel = rpc.internal_channel(address)

    async def start(self, *, local: bool) -> None:
        rpc.bind(self.server, self.address)
        if local:
            await self.beside.start(self.address)
        await self.server.start()

    async def stop(self, seconds: float = 0.0) -> None:
        await asyncio.gather(self.beside.stop(seconds), self.server.stop(seconds))

    async def open(self) -> streams.Stream[scheduler_pb2.AttachResponse]:
        over_grpc = self.channel.stream_stream(METHOD, Request.SerializeToString, Response.FromString)
        return await streams.open_stream(self.address, METHOD, Response, over_grpc)


@pytest.fixture
def folder() -> Iterator[Path]:
    # A Unix socket's path must stay below 108 bytes, which a test's own folder may not.
    with tempfile.TemporaryDirectory(prefix="by") as name:
        yield Path(name)


@asynccontextmanager
async def running(folder: Path, *, local: bool) -> AsyncGenerator[Running]:
    server = Running(f"unix:{folder}/service", Service())
    await server.start(local=local)
    try:
        async with asyncio.timeout(SECONDS):
            yield server
    finally:
        await server.stop()
        await server.channel.close(None)


both = pytest.mark.parametrize("local", [False, True], ids=["grpc", "local"])


async def read_text(stream: streams.Stream[scheduler_pb2.AttachResponse]) -> str:
    message = await stream.read()
    assert message is not None
    return message.readiness.message


async def error_of(stream: streams.Stream[Any]) -> BlockyardError:
    with pytest.raises(BlockyardError) as told:
        while await stream.read() is not None:
            pass
    return told.value


@both
async def test_messages_come_in_order_and_the_end_behind_them(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        for number in range(20):
            await stream.write(ask(str(number)))
        assert [await read_text(stream) for _ in range(20)] == list(map(str, range(20)))
        await stream.write(ask("last"))
        await stream.write(ask("end"))
        assert await read_text(stream) == "last"
        assert await stream.read() is None
        assert await stream.read() is None


@both
async def test_a_stream_runs_where_it_is_told_to(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        assert type(await server.open()).__name__ == ("_LocalStream" if local else "_GrpcStream")


@both
async def test_an_error_comes_whole_behind_what_was_said_before(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        await stream.write(ask("before"))
        await stream.write(ask("refuse"))
        assert await read_text(stream) == "before"
        error = await error_of(stream)
        assert (error.reason, error.message, error.metadata) == (Reason.QUEUE_FULL, "too many", {"key": "value"})
        assert error.retry_after_seconds == 2.0


@both
async def test_a_bug_is_told_without_its_text(folder: Path, local: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        await stream.write(ask("break"))
        error = await error_of(stream)
        assert error.reason is Reason.BUG
        assert "a bug" not in error.message
    assert "a handler failed" in caplog.text


@both
async def test_what_is_written_behind_the_end_is_refused(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        await stream.write(ask("end"))
        assert await stream.read() is None
        with pytest.raises(BlockyardError) as told:
            await stream.write(ask("more"))
        assert told.value.reason in (Reason.NO_READY_WORKER, Reason.BUG)


@both
async def test_a_cancel_reaches_the_handler(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        await stream.write(ask("hello"))
        await read_text(stream)
        stream.cancel()
        stream.cancel()
        await server.service.ended.wait()
        with pytest.raises((BlockyardError, asyncio.CancelledError)):
            await stream.read()


@both
async def test_a_server_that_stops_says_so(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        await stream.write(ask("hello"))
        await read_text(stream)
        await server.stop(0.1)
        # gRPC itself may be faster than what its handler has to say.
        assert (await error_of(stream)).reason in (Reason.DRAINING, *(() if local else (Reason.NO_READY_WORKER,)))


@both
async def test_a_stream_may_end_by_itself_while_its_server_stops(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        await stream.write(ask("hello"))
        await read_text(stream)
        stopping = asyncio.create_task(server.stop(SECONDS))
        await stream.write(ask("end"))
        assert await stream.read() is None
        await stopping


@both
async def test_a_slow_reader_holds_the_writer_back(folder: Path, local: bool) -> None:
    async with running(folder, local=local) as server:
        stream = await server.open()
        await stream.write(ask("hello"))
        await read_text(stream)
        await stream.write(ask("flood"))
        await stream.write(ask("end"))
        # Nothing more is read by this side's loop until the first read below.
        num_read = 0
        while await stream.read() is not None:
            num_read += 1
        assert num_read == server.service.num_written == 200


async def test_nobody_at_either_socket(folder: Path) -> None:
    address = f"unix:{folder}/nobody"
    async with rpc.internal_channel(address) as channel:
        over_grpc = channel.stream_stream(METHOD, Request.SerializeToString, Response.FromString)
        stream = await streams.open_stream(address, METHOD, Response, over_grpc)
        error = await error_of(stream)
    assert error.reason is Reason.NO_READY_WORKER
    assert TRANSPORT_ORIGIN.items() <= error.metadata.items()


async def test_a_dead_socket_is_passed_by_and_taken_over(folder: Path) -> None:
    (folder / "service.streams").touch()
    async with running(folder, local=False) as server:
        assert type(await server.open()).__name__ == "_GrpcStream"
    async with running(folder, local=True) as server:
        assert type(await server.open()).__name__ == "_LocalStream"
    assert not (folder / "service.streams").exists()


async def test_an_unknown_method_is_refused(folder: Path) -> None:
    async with running(folder, local=True) as server:
        stream = await streams.open_stream(server.address, "/test.Service/Other", Response, lambda: None)
        assert (await error_of(stream)).reason is Reason.UNSUPPORTED_PARAMETER


async def test_a_lost_connection_is_told_as_grpc_would(folder: Path) -> None:
    async with running(folder, local=True) as server:
        stream = await server.open()
        await stream.write(ask("hello"))
        await read_text(stream)
        connections = [task.get_coro().cr_frame.f_locals["connection"] for task in server.beside._running]
        for connection in connections:
            connection.abort(frames.broken("cut"))
        error = await error_of(stream)
        assert error.reason is Reason.NO_READY_WORKER
        assert TRANSPORT_ORIGIN.items() <= error.metadata.items()
        await server.service.ended.wait()


@pytest.mark.parametrize("address", ["127.0.0.1:50070", "scheduler:1", "unix:/" + "x" * 100])
async def test_an_address_without_a_place_beside_it(address: str) -> None:
    assert streams.local_path(address) == ""
    server = streams.StreamServer({})
    await server.start(address)
    with suppress(FileNotFoundError):
        await server.stop(0.0)
