"""Cases of the conformance suite: messages that fill a window, and messages that are too large."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.integration.kit.simulation.calls import ALL, MANY, SHORT
from tests.integration.kit.simulation.outcomes import collect, open_call
from tests.integration.kit.simulation.worlds import World, plain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


async def writes_into_a_full_window(world: World) -> None:
    async def reads_late(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        await world.signal("read").wait()
        num_bytes = 0
        while (message := await context.read()) is not grpc.aio.EOF:
            num_bytes += len(message)
        yield b"%d" % num_bytes

    async with world.serving({"Method": ("stream-stream written", reads_late)}) as channel:
        call = open_call(channel, "stream-stream")

        async def write() -> None:
            for _ in range(40):
                await call.write(bytes(1_000_000))
            await call.done_writing()

        task = asyncio.create_task(write())
        await asyncio.sleep(SHORT)
        world.client.note("all written", task.done())
        world.signal("read").set()
        await world.client.tried("write", task)
        await world.client.tried("all", collect(call))


async def reads_late_of_a_full_window(world: World) -> None:
    async def sends(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        for _ in range(40):
            yield bytes(1_000_000)
        world.signal("all sent").set()

    for kind in MANY:
        world.signal("all sent").clear()
        async with world.serving({"Method": (kind, sends)}) as channel:
            call = open_call(channel, kind, b"x")
            await call.initial_metadata()
            await asyncio.sleep(SHORT)
            world.client.note("all sent", world.signal("all sent").is_set())
            world.client.note("read", sum(map(len, await collect(call))))


LIMIT = 1000


async def exceeds_limits(world: World) -> None:
    async def sends(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        size = len(request) if isinstance(request, bytes) else len(await anext(aiter(request)))
        world.server.note("request", size)
        yield bytes(LIMIT if size == 1 else 2 * LIMIT)

    receive = [("grpc.max_receive_message_length", LIMIT)]
    send = [("grpc.max_send_message_length", LIMIT)]
    for kind in ALL:
        for side, options in (("receive", receive), ("send", send)):
            for size in (1, LIMIT, LIMIT + 1):
                # The server may receive its request where the client's limits are looked at.
                async with world.serving({"Method": (kind, sends)}, channel_options=options) as channel:
                    await _exchange(world, channel, kind, f"client's {side}", size)
                async with world.serving({"Method": (kind, sends)}, options=options) as channel:
                    await _exchange(world, channel, kind, f"server's {side}", size)


async def _exchange(world: World, channel: Any, kind: str, label: str, size: int) -> None:
    call = open_call(channel, kind, bytes(size))
    if kind.startswith("stream"):
        # Where the write is refused, or meets the call's end, the status says why.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            await call.write(bytes(size))
            await call.done_writing()
    with suppress(grpc.RpcError, asyncio.CancelledError):
        await (collect(call) if kind in MANY else call)
    world.client.note(kind, label, size, await call.code(), plain(await call.details()))


CASES = {case.__name__: case for case in (writes_into_a_full_window, reads_late_of_a_full_window, exceeds_limits)}
