"""Cases of the conformance suite: connections that are lost, or hold everything back.

The real ones go through a proxy, which does that to them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.integration.kit.simulation.calls import ALL, MANY, SHORT, waits
from tests.integration.kit.simulation.outcomes import collect, echoes, open_call

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.integration.kit.simulation.worlds import World

KEEPALIVE = [
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 100),
    ("grpc.http2.ping_timeout_ms", 100),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
PERMISSIVE = [("grpc.http2.min_ping_interval_without_data_ms", 1), ("grpc.http2.max_ping_strikes", 0)]


async def _code_of(world: World, call: Any) -> None:
    """Notes how a call ended, whose details name the system's error."""
    world.client.note(await call.code(), call.done(), call.cancelled())


async def _end(call: Any, kind: str) -> None:
    with suppress(grpc.RpcError):
        await (collect(call) if kind in MANY else call)


async def is_cut_while_it_waits(kind: str, world: World) -> None:
    async with world.breakable(), world.serving({"Method": (kind, waits)}) as channel:
        call = open_call(channel, kind, b"x")
        await world.signal("begun").wait()
        world.cut()
        await _end(call, kind)
        await _code_of(world, call)
        await world.signal("over").wait()


async def is_cut_and_its_channel_goes_on(world: World) -> None:
    async with world.breakable(), world.serving({"Method": ("unary-unary", echoes)}) as channel:
        for _ in range(3):
            await world.client.tried("call", open_call(channel, "unary-unary", b"x", wait_for_ready=True))
            world.cut()
            while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
                await channel.wait_for_state_change(state)
            world.client.note(state)


async def is_cut_with_unread_messages(world: World) -> None:
    async def sends(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        context.add_done_callback(lambda _: world.signal("over").set())
        for number in range(3):
            yield b"%d" % number
        world.signal("sent").set()
        await asyncio.Event().wait()

    async with world.breakable(), world.serving({"Method": ("unary-stream", sends)}) as channel:
        call = open_call(channel, "unary-stream", b"x")
        await world.client.tried("read", call.read())
        await world.signal("sent").wait()
        await asyncio.sleep(SHORT)
        world.cut()
        await world.signal("over").wait()
        await call.code()
        with suppress(grpc.RpcError):
            await world.client.tried("read", _read_all(call))
        await _code_of(world, call)


async def _read_all(call: Any) -> list[bytes]:
    """Reads what can be read."""
    messages: list[bytes] = []
    with suppress(grpc.RpcError):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    return messages


async def is_cut_after_its_end_arrived(world: World) -> None:
    async def sends(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        context.add_done_callback(lambda _: world.signal("over").set())
        for number in range(3):
            yield b"%d" % number

    async with world.breakable(), world.serving({"Method": ("unary-stream", sends)}) as channel:
        call = open_call(channel, "unary-stream", b"x")
        await world.client.tried("read", call.read())
        await world.signal("over").wait()
        await asyncio.sleep(SHORT)
        world.cut()
        await asyncio.sleep(SHORT)
        world.client.note("rest", await _read_all(call))
        await _code_of(world, call)


async def is_cut_while_its_client_writes(world: World) -> None:
    async with world.breakable(), world.serving({"Method": ("stream-stream", waits)}) as channel:
        call = open_call(channel, "stream-stream")

        async def write() -> None:
            while True:
                await call.write(bytes(1_000_000))

        task = asyncio.create_task(write())
        await world.signal("begun").wait()
        await asyncio.sleep(SHORT)
        world.cut()
        await world.signal("over").wait()
        # Whether the write or the status ends first is open, and with it the code.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await task
        await call.code()
        world.client.note(call.done(), call.cancelled())


async def is_cut_while_its_server_writes(world: World) -> None:
    async def sends(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        context.add_done_callback(lambda _: world.signal("over").set())
        world.signal("begun").set()
        try:
            while True:
                yield bytes(1_000_000)
        finally:
            world.server.note("ended")

    async with world.breakable(), world.serving({"Method": ("unary-stream", sends)}) as channel:
        call = open_call(channel, "unary-stream", b"x")
        await world.signal("begun").wait()
        await asyncio.sleep(SHORT)
        world.cut()
        await world.signal("over").wait()
        await _code_of(world, call)


async def is_partitioned_until_its_deadline(kind: str, world: World) -> None:
    async with world.breakable(), world.serving({"Method": (kind, echoes)}) as channel:
        await channel.channel_ready()
        heal = world.partition()
        call = open_call(channel, kind, b"x", timeout=SHORT)
        await _end(call, kind)
        await _code_of(world, call)
        heal()
        later = open_call(channel, kind, b"x")
        if kind.startswith("stream"):
            await later.write(b"x")
            await later.done_writing()
        await world.client.tried("later", collect(later) if kind in MANY else later)


async def is_partitioned_until_its_keepalive(world: World) -> None:
    async with (
        world.breakable(),
        world.serving({"Method": ("unary-stream", waits)}, PERMISSIVE, channel_options=KEEPALIVE) as channel,
    ):
        call = open_call(channel, "unary-stream", b"x")
        await world.client.tried("first", call.read())
        await world.signal("begun").wait()
        heal = world.partition()
        await world.client.tried("rest", call.read())
        await _code_of(world, call)
        heal()
        await world.signal("over").wait()


async def is_partitioned_for_a_moment(world: World) -> None:
    async with world.breakable(), world.serving({"Method": ("stream-stream", echoes)}) as channel:
        call = open_call(channel, "stream-stream")
        await call.write(b"before")
        await world.client.tried("before", call.read())
        heal = world.partition()
        for number in range(3):
            await call.write(b"%d" % number)
        await asyncio.sleep(SHORT)
        heal()
        for _ in range(3):
            await world.client.tried("after", call.read())
        await call.done_writing()
        await world.client.tried("end", call.read())


BY_KIND = [is_cut_while_it_waits, is_partitioned_until_its_deadline]
CASES = {
    **{f"{case.__name__} in {kind}": partial(case, kind) for case in BY_KIND for kind in ALL},
    **{
        case.__name__: case
        for case in (
            is_cut_and_its_channel_goes_on,
            is_cut_with_unread_messages,
            is_cut_after_its_end_arrived,
            is_cut_while_its_client_writes,
            is_cut_while_its_server_writes,
            is_partitioned_until_its_keepalive,
            is_partitioned_for_a_moment,
        )
    },
}
