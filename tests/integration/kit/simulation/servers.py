"""Cases of the conformance suite: connecting, stopping, and what interceptors do."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.integration.kit.simulation.calls import SHORT, waits
from tests.integration.kit.simulation.outcomes import aborts, collect, echoes, look, open_call, raises
from tests.integration.kit.simulation.worlds import SERVICE, World, make_handler

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

# Attempts to connect follow quickly.
QUICK = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]


async def ignores_cancellation(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    world.signal("begun").set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        world.server.note("cancelled")
    await world.signal("go on").wait()
    world.server.note("ends")
    world.signal("ended").set()
    yield b"late"


async def waits_for_leave(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    world.signal("begun").set()
    await world.signal("leave").wait()
    yield b"in time"


async def _serve(world: World, kind: str, behaviour: Any) -> Any:
    server = world.make_server()
    methods = {"Method": make_handler(world, kind, behaviour)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    await world.start(server)
    return server


async def finds_no_server(world: World) -> None:
    async with world.make_channel() as channel:
        for kind in ("unary-unary", "unary-stream", "stream-unary", "stream-stream"):
            call = open_call(channel, kind, b"x")
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                if kind.startswith("stream"):
                    await call.write(b"x")
            await world.client.tried(kind, collect(call) if kind.endswith("stream") else call)
            await look(world, call)


async def waits_for_no_server(world: World) -> None:
    async with world.make_channel() as channel:
        call = open_call(channel, "unary-unary", b"x", wait_for_ready=True, timeout=world.deadline)
        with suppress(grpc.RpcError):
            await call
        world.client.note(await call.code(), call.done())


async def waits_for_a_server(world: World) -> None:
    async with world.make_channel(QUICK) as channel:
        call = open_call(channel, "unary-unary", b"x", wait_for_ready=True)
        # It has failed to connect once, and does not wait for the server.
        await world.client.tried("without", open_call(channel, "unary-unary", b"x"))
        world.client.note("state", channel.get_state())
        server = await _serve(world, "unary-unary", echoes)
        await world.client.tried("with", call)
        world.client.note("state", channel.get_state())
        await world.stop(server)


async def shows_its_state(world: World) -> None:
    channel = world.make_channel(QUICK)
    world.client.note(channel.get_state())
    world.client.note(channel.get_state(try_to_connect=True))
    await channel.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
    while (state := channel.get_state()) is grpc.ChannelConnectivity.CONNECTING:
        await channel.wait_for_state_change(state)
    world.client.note(channel.get_state())
    server = await _serve(world, "unary-unary", echoes)
    await channel.channel_ready()
    world.client.note(channel.get_state())
    await world.stop(server)
    while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
    world.client.note(channel.get_state())
    waiting = asyncio.create_task(channel.wait_for_state_change(channel.get_state()))
    await asyncio.sleep(0)
    await channel.close()
    await world.client.tried("wait", waiting)
    for attempt in (channel.get_state, lambda: open_call(channel, "unary-unary", b"x").done()):
        try:
            world.client.note("closed", attempt())
        except grpc.aio.UsageError as error:
            world.client.note("closed", str(error))
    await channel.close()


async def stops_without_grace(world: World) -> None:
    for kind in ("unary-unary", "unary-stream", "stream-stream"):
        world.signal("begun").clear()
        server = await _serve(world, kind, waits)
        async with world.make_channel() as channel:
            call = open_call(channel, kind, b"x")
            if kind.endswith("stream"):
                await world.client.tried("first", call.read())
            await world.signal("begun").wait()
            await server.stop(None)
            # The words depend on whether the connection ends meanwhile.
            with suppress(grpc.RpcError):
                await (call.read() if kind.endswith("stream") else call)
            world.client.note(await call.code(), call.done(), call.cancelled())
        await world.stop(server)


async def stops_with_grace(world: World) -> None:
    server = await _serve(world, "unary-unary", waits_for_leave)
    async with world.make_channel() as channel:
        call = open_call(channel, "unary-unary", b"x")
        await world.signal("begun").wait()
        stopping = asyncio.create_task(server.stop(1000))
        await asyncio.sleep(SHORT)
        world.client.note("stopped", stopping.done())
        late = open_call(channel, "unary-unary", b"x")
        with suppress(grpc.RpcError):
            await late
        world.client.note("late", await late.code())
        world.signal("leave").set()
        await world.client.tried("early", call)
        await stopping
        world.client.note(await server.wait_for_termination())


async def stops_after_its_grace(world: World) -> None:
    server = await _serve(world, "unary-unary", waits)
    async with world.make_channel() as channel:
        call = open_call(channel, "unary-unary", b"x")
        await world.signal("begun").wait()
        await server.stop(SHORT)
        with suppress(grpc.RpcError):
            await call
        world.client.note(await call.code())


async def stops_while_a_handler_goes_on(world: World) -> None:
    server = await _serve(world, "unary-unary", ignores_cancellation)
    async with world.make_channel() as channel:
        call = open_call(channel, "unary-unary", b"x")
        await world.signal("begun").wait()
        stopping = asyncio.create_task(server.stop(None))
        with suppress(grpc.RpcError):
            await call
        world.client.note(await call.code())
        await asyncio.sleep(SHORT)
        world.client.note("stopped", stopping.done())
        world.signal("go on").set()
        await stopping
        await world.signal("ended").wait()


async def starts_again(world: World) -> None:
    server = await _serve(world, "unary-unary", echoes)
    async with world.make_channel(QUICK) as channel:
        await world.client.tried("first", open_call(channel, "unary-unary", b"x"))
        await world.stop(server)
        # A call on a connection whose end is not noticed yet may fail.
        while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
            await channel.wait_for_state_change(state)
        server = await _serve(world, "unary-unary", echoes)
        await world.client.tried("second", open_call(channel, "unary-unary", b"x", wait_for_ready=True))
    await world.stop(server)
    world.server.note(await server.wait_for_termination(1))


async def waits_for_its_end(world: World) -> None:
    server = await _serve(world, "unary-unary", echoes)
    world.server.note(await server.wait_for_termination(0.001))
    await world.server.tried("start again", server.start())
    await world.stop(server)
    await world.server.tried("start once more", server.start())
    await world.stop(server)


class _Noting(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        key = [value for key, value in details.invocation_metadata if key == "key"]
        self._world.server.note(self._name, details.method, key)
        handler = await continuation(details)
        self._world.server.note(self._name, handler is not None)
        return handler


class _Replacing(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    def __init__(self, make: Any) -> None:
        self._make = make

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        return await self._make(continuation, details)


async def goes_through_interceptors(world: World) -> None:
    interceptors = [_Noting(world, "first"), _Noting(world, "second")]
    for kind in ("unary-unary", "stream-stream"):
        async with world.serving({"Method": (kind, echoes)}, interceptors=interceptors) as channel:
            call = open_call(channel, kind, b"x", metadata=[("key", "value")])
            if kind.startswith("stream"):
                await call.done_writing()
            await world.client.tried(kind, collect(call) if kind.endswith("stream") else call)
            await world.client.tried("unknown", channel.unary_unary(f"/{SERVICE}/Unknown")(b"x"))


async def meets_an_interceptor_that_answers_itself(world: World) -> None:
    async def instead(behaviour: Any, continuation: Any, details: Any) -> Any:
        return make_handler(world, "unary-unary", behaviour)

    async def nothing(continuation: Any, details: Any) -> Any:
        return None

    async def fail(continuation: Any, details: Any) -> Any:
        raise ValueError("an interceptor failed")

    async def abort(continuation: Any, details: Any) -> Any:
        return await instead(aborts, continuation, details)

    async def go_wrong(continuation: Any, details: Any) -> Any:
        return await instead(raises, continuation, details)

    for make in (nothing, fail, abort, go_wrong):
        async with world.serving({"Method": ("unary-unary", echoes)}, interceptors=[_Replacing(make)]) as channel:
            await world.client.tried(make.__name__, open_call(channel, "unary-unary", b"x"))


async def keeps_many_calls_apart(world: World) -> None:
    async with world.serving({"Method": ("stream-stream written", echoes)}) as channel:

        async def talk(name: str) -> list[bytes]:
            call = open_call(channel, "stream-stream")
            answers = []
            for number in range(10):
                await call.write(f"{name}{number}".encode())
                answers.append(await call.read())
            await call.done_writing()
            return answers

        world.client.note(await asyncio.gather(*(talk(name) for name in "abcdefgh")))


CASES = {
    case.__name__: case
    for case in (
        finds_no_server,
        waits_for_no_server,
        waits_for_a_server,
        shows_its_state,
        stops_without_grace,
        stops_with_grace,
        stops_after_its_grace,
        stops_while_a_handler_goes_on,
        starts_again,
        waits_for_its_end,
        goes_through_interceptors,
        meets_an_interceptor_that_answers_itself,
        keeps_many_calls_apart,
    )
}
