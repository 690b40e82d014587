"""Cases of the conformance suite: what a handler does, in each kind of call, and what both sides see of it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import grpc.aio

from tests.integration.kit.simulation.worlds import KINDS, SERVICE, World, pairs, plain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class _Status(NamedTuple):
    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, Any], ...]


METADATA = (("key", "value"), ("key", "other"), ("data-bin", b"\x00\xff"))
DENIED = grpc.StatusCode.PERMISSION_DENIED


async def succeeds(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    yield b"one"
    yield b""
    yield b"three"


async def gives_nothing(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    return
    yield b""


async def echoes(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    if isinstance(request, bytes):
        yield request
    else:
        async for message in request:
            yield b"<" + message + b">"


async def reads(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    if not isinstance(request, bytes):
        while (message := await context.read()) is not grpc.aio.EOF:
            world.server.note("read", message)
        await world.server.tried("read again", context.read())
    yield b"done"


async def shows_metadata(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    world.server.note("invocation", pairs(context.invocation_metadata()))
    await context.send_initial_metadata(METADATA)
    await world.server.tried("send again", context.send_initial_metadata(METADATA))
    context.set_trailing_metadata(METADATA[1:])
    world.server.note("trailing", pairs(context.trailing_metadata()), context.details(), context.code())
    yield b"x"


async def sets_a_code(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    context.set_code(grpc.StatusCode.ALREADY_EXISTS)
    context.set_details("it is there")
    context.set_trailing_metadata(METADATA)
    world.server.note("set", context.code(), context.details())
    yield b"x"


async def sets_details_only(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    context.set_details("all is well")
    yield b"x"


async def aborts(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    await context.abort(DENIED, "no", METADATA)
    yield b"never"


async def aborts_after_a_message(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    yield b"one"
    await context.abort(DENIED, "after one")


async def aborts_with_what_was_set(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    context.set_details("set before")
    context.set_trailing_metadata(METADATA)
    await context.abort(DENIED)
    yield b"never"


async def aborts_with_a_status(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    await context.abort_with_status(_Status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", METADATA))
    yield b"never"


async def aborts_twice(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    try:
        await context.abort(DENIED, "first")
    finally:
        await world.server.tried("second", context.abort(DENIED, "second"))
    yield b"never"


async def suppresses_its_abort(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    with suppress(grpc.aio.AbortError):
        await context.abort(DENIED, "suppressed")
    world.server.note("after", context.done(), context.cancelled())
    await world.server.tried("write", context.write(b"x"))
    yield b"x"


async def raises(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    raise ValueError("wrong")
    yield b"never"


async def raises_after_a_message(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    yield b"one"
    raise KeyError("late")


async def raises_with_a_code(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    context.set_code(grpc.StatusCode.DATA_LOSS)
    context.set_trailing_metadata(METADATA)
    raise ValueError("with a code")
    yield b"never"


async def ends_before_the_requests(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    if not isinstance(request, bytes):
        world.server.note("first", await anext(aiter(request)))
    yield b"enough"


async def calls_back(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    context.add_done_callback(lambda context: world.server.note("done", context.done(), context.cancelled()))
    world.server.note("time", context.time_remaining(), context.done(), context.cancelled())
    yield b"x"


BEHAVIOURS = [
    succeeds,
    gives_nothing,
    echoes,
    reads,
    shows_metadata,
    sets_a_code,
    sets_details_only,
    aborts,
    aborts_after_a_message,
    aborts_with_what_was_set,
    aborts_with_a_status,
    aborts_twice,
    suppresses_its_abort,
    raises,
    raises_after_a_message,
    raises_with_a_code,
    ends_before_the_requests,
    calls_back,
]


async def _outcome(kind: str, behaviour: Any, world: World) -> None:
    takes_many, gives_many, _ = KINDS[kind]

    async def behave(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        # How a write ends that races with the call's end is open.
        await world.signal("sent").wait()
        async for response in behaviour(world, request, context):
            yield response

    async with world.serving({"Method": (kind, behave)}) as channel:
        call = open_call(channel, kind, b"request", metadata=METADATA)
        call.add_done_callback(lambda call: world.client.note("call is done", call.done(), call.cancelled()))
        if takes_many:
            await world.client.tried("write", call.write(b"a"))
            await world.client.tried("write", call.write(b"b"))
            await world.client.tried("done writing", call.done_writing())
        world.signal("sent").set()
        if gives_many:
            await world.client.tried("all", collect(call))
        else:
            await world.client.tried("response", call)
        await look(world, call)


async def collect(call: Any) -> list[bytes]:
    return [message async for message in call]


async def look(world: World, call: Any) -> None:
    """Notes all that a call tells once it is over."""
    world.client.note(await call.code(), plain(await call.details()))
    world.client.note(pairs(await call.initial_metadata()), pairs(await call.trailing_metadata()))
    world.client.note(call.done(), call.cancelled(), call.time_remaining())


def open_call(channel: Any, kind: str, request: Any = None, **options: Any) -> Any:
    takes_many, gives_many, _ = KINDS[kind]
    name = f"{'stream' if takes_many else 'unary'}_{'stream' if gives_many else 'unary'}"
    make = getattr(channel, name)(f"/{SERVICE}/Method")
    return make(**options) if takes_many else make(request, **options)


CASES = {
    f"{behaviour.__name__} in {kind}": partial(_outcome, kind, behaviour) for behaviour in BEHAVIOURS for kind in KINDS
}
