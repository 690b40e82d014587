"""Cases of the conformance suite: what a client does with a call, in which order, and what both sides see of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.integration.kit.simulation.outcomes import collect, echoes, look, open_call, succeeds
from tests.integration.kit.simulation.worlds import SERVICE, TooBusy, World, pairs, plain

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

# Long enough for what happens at once to have happened.
SHORT = 0.02
# A deadline that is never reached.
LONG = 1000.0
MANY = ("unary-stream", "unary-stream written", "stream-stream", "stream-stream written")
ALL = ("unary-unary", "stream-unary", *MANY)


async def waits(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    """Says that it began, and waits until it is cancelled."""
    context.add_done_callback(lambda context: world.signal("over").set())
    world.server.note("begun", context.done(), context.cancelled())
    yield b"first"
    world.signal("begun").set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        world.server.note("cancelled", context.done(), context.cancelled(), context.code())
        raise


async def waits_for_a_request(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    """Waits for requests until there are no more, or it is cancelled."""
    context.add_done_callback(lambda context: world.signal("over").set())
    world.signal("begun").set()
    yield b"first"
    try:
        while (message := await context.read()) is not grpc.aio.EOF:
            world.server.note("read", message)
            yield b"<" + message + b">"
        world.server.note("no more")
    except asyncio.CancelledError:
        world.server.note("cancelled", context.done())
        raise


async def fills_the_window(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    """Sends more than anyone reads."""
    context.add_done_callback(lambda context: world.signal("over").set())
    try:
        for number in range(1000):
            if number == 30:
                world.signal("begun").set()
            yield bytes(100_000)
    finally:
        world.server.note("ended")


async def outlives_its_call(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    """Goes on when it is cancelled, and tries to write."""
    context.add_done_callback(lambda context: world.signal("over").set())
    yield b"first"
    world.signal("begun").set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        world.server.note("cancelled")
    world.server.note("state", context.done(), context.cancelled())
    await world.server.tried("write", context.write(b"late"))
    await world.server.tried("read", context.read())
    await world.server.tried("abort", context.abort(grpc.StatusCode.ABORTED, "late"))


async def _is_over(world: World) -> None:
    """Waits for the handler of a call that reached its deadline."""
    if not world.signal("begun").is_set():
        raise TooBusy
    await world.signal("over").wait()


async def is_cancelled(kind: str, world: World) -> None:
    async with world.serving({"Method": (kind, waits)}) as channel:
        call = open_call(channel, kind, b"x")
        call.add_done_callback(lambda call: world.client.note("done", call.cancelled()))
        await world.signal("begun").wait()
        world.client.note("cancel", call.cancel(), call.cancel(), call.done())
        await world.client.tried("result", collect(call) if kind in MANY else call)
        await look(world, call)
        await world.signal("over").wait()


async def is_cancelled_at_once(kind: str, world: World) -> None:
    async with world.serving({"Method": (kind, waits)}) as channel:
        call = open_call(channel, kind, b"x")
        world.client.note("cancel", call.cancel())
        await world.client.tried("result", collect(call) if kind in MANY else call)
        await look(world, call)


async def reaches_its_deadline(kind: str, world: World) -> None:
    async with world.serving({"Method": (kind, waits)}) as channel:
        call = open_call(channel, kind, b"x", timeout=world.deadline)
        world.client.note(0 < call.time_remaining() <= world.deadline)
        await world.client.tried("result", collect(call) if kind in MANY else call)
        await look(world, call)
        await _is_over(world)


async def has_no_time(kind: str, world: World) -> None:
    async with world.serving({"Method": (kind, waits)}) as channel:
        call = open_call(channel, kind, b"x", timeout=-1)
        await world.client.tried("result", collect(call) if kind in MANY else call)
        world.client.note(await call.code(), plain(await call.details()), call.time_remaining())


async def has_its_task_cancelled(kind: str, world: World) -> None:
    async def use(call: Any) -> None:
        if kind not in MANY:
            await call
        else:
            async for _ in call:
                world.signal("reading").set()

    async with world.serving({"Method": (kind, waits)}) as channel:
        call = open_call(channel, kind, b"x")
        task = asyncio.create_task(use(call))
        await world.signal("begun").wait()
        # In the instant in which a message arrives, grpc.aio may cancel the task and not the call.
        if kind in MANY:
            await world.signal("reading").wait()
        await asyncio.sleep(SHORT)
        task.cancel()
        await world.client.tried("task", task)
        await look(world, call)
        await world.signal("over").wait()


async def is_cancelled_behind_a_full_window(kind: str, world: World) -> None:
    async with world.serving({"Method": (kind, fills_the_window)}) as channel:
        call = open_call(channel, kind, b"x")
        world.client.note("first", len(await call.read()))
        call.cancel()
        await world.client.tried("read", call.read())
        await look(world, call)
        await world.signal("over").wait()


async def outlives_a_cancel(kind: str, world: World) -> None:
    async with world.serving({"Method": (kind, outlives_its_call)}) as channel:
        call = open_call(channel, kind, b"x")
        await world.signal("begun").wait()
        call.cancel()
        await world.signal("over").wait()


async def outlives_a_deadline(kind: str, world: World) -> None:
    async with world.serving({"Method": (kind, outlives_its_call)}) as channel:
        call = open_call(channel, kind, b"x", timeout=world.deadline)
        await world.client.tried("result", collect(call) if kind in MANY else call)
        await _is_over(world)


BY_KIND = [
    is_cancelled,
    is_cancelled_at_once,
    reaches_its_deadline,
    has_no_time,
    has_its_task_cancelled,
]


async def reads_to_the_end(world: World) -> None:
    async with world.serving({"Method": ("unary-stream", succeeds)}) as channel:
        call = open_call(channel, "unary-stream", b"x")
        await world.client.tried("metadata", call.initial_metadata())
        for _ in range(3):
            await world.client.tried("read", call.read())
        for _ in range(2):
            await world.client.tried("read", call.read())
        await look(world, call)
        await world.client.tried("iterate", collect(call))


async def _sends_two(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
    context.add_done_callback(lambda _: world.signal("over").set())
    world.signal("begun").set()
    yield b"one"
    yield b"two"


async def sees_its_status_once_all_is_read(world: World) -> None:
    async with world.serving({"Method": ("unary-stream", _sends_two)}) as channel:
        call = open_call(channel, "unary-stream", b"x")
        await world.signal("over").wait()
        await asyncio.sleep(SHORT)
        world.client.note("done", call.done())
        await world.client.tried("read", call.read())
        await asyncio.sleep(SHORT)
        world.client.note("done", call.done())
        await world.client.tried("read", call.read())
        world.client.note(await call.code(), call.done())
        await world.client.tried("read", call.read())


async def reads_after_its_deadline(world: World) -> None:
    async with world.serving({"Method": ("unary-stream", _sends_two)}) as channel:
        call = open_call(channel, "unary-stream", b"x", timeout=world.deadline)
        await world.client.tried("read", call.read())
        await asyncio.sleep(2 * world.deadline)
        await world.client.tried("rest", call.read())
        await world.client.tried("rest", call.read())
        await look(world, call)
        await _is_over(world)


async def is_cancelled_before_all_is_read(world: World) -> None:
    async with world.serving({"Method": ("unary-stream", _sends_two)}) as channel:
        call = open_call(channel, "unary-stream", b"x")
        await world.client.tried("first", anext(aiter(call)))
        await world.signal("over").wait()
        await asyncio.sleep(SHORT)
        world.client.note("cancel", call.cancel())
        await world.client.tried("rest", collect(call))
        await look(world, call)


async def mixes_styles(world: World) -> None:
    async with world.serving({"Method": ("stream-stream", echoes)}) as channel:
        call = open_call(channel, "stream-stream")
        await world.client.tried("write", call.write(b"x"))
        await world.client.tried("read", call.read())
        await world.client.tried("iterate", collect(call))
        call.cancel()
        iterated = open_call(channel, "stream-stream", request_iterator=iter([b"x"]))
        await world.client.tried("write", iterated.write(b"x"))
        await world.client.tried("done writing", iterated.done_writing())
        await world.client.tried("iterate", collect(iterated))


async def talks_in_turns(world: World) -> None:
    async with world.serving({"Method": ("stream-stream written", echoes)}) as channel:
        call = open_call(channel, "stream-stream")
        for number in range(5):
            await call.write(b"%d" % number)
            await world.client.tried("read", call.read())
        await call.done_writing()
        await call.done_writing()
        await world.client.tried("read", call.read())
        await look(world, call)


async def writes_after_done_writing(world: World) -> None:
    async with world.serving({"Method": ("stream-stream", waits_for_a_request)}) as channel:
        call = open_call(channel, "stream-stream")
        await call.write(b"x")
        await call.done_writing()
        await world.client.tried("write", call.write(b"y"))
        await world.client.tried("all", collect(call))
        await world.client.tried("write", call.write(b"y"))
        await world.client.tried("done writing", call.done_writing())


async def writes_after_the_end(world: World) -> None:
    async def ends(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        context.set_details("enough")
        context.set_code(grpc.StatusCode.OUT_OF_RANGE)
        return
        yield b""

    for kind in ("stream-unary", "stream-stream"):
        async with world.serving({"Method": (kind, ends)}) as channel:
            call = open_call(channel, kind)
            world.client.note(await call.code())
            await world.client.tried("write", call.write(b"x"))
            await world.client.tried("done writing", call.done_writing())
            await world.client.tried("result", call.read() if kind in MANY else call)


async def half_closes_without_a_message(world: World) -> None:
    for kind in ("stream-unary", "stream-stream"):
        async with world.serving({"Method": (kind, echoes)}) as channel:
            call = open_call(channel, kind)
            await call.done_writing()
            await world.client.tried("result", collect(call) if kind in MANY else call)


async def _generate() -> AsyncIterator[bytes]:
    for number in range(3):
        yield b"%d" % number
        await asyncio.sleep(0)


async def _fail_in_the_middle() -> AsyncIterator[bytes]:
    yield b"one"
    raise ValueError("no more requests")


def _fail_at_once() -> Iterator[bytes]:
    raise ValueError("no requests")
    yield b""


async def iterates_over_requests(world: World) -> None:
    for kind in ("stream-unary", "stream-stream"):
        for make in (lambda: iter([b"a", b"b"]), _generate, lambda: iter(())):
            async with world.serving({"Method": (kind, echoes)}) as channel:
                call = open_call(channel, kind, request_iterator=make())
                await world.client.tried("result", collect(call) if kind in MANY else call)
                await look(world, call)


async def iterates_over_requests_that_fail(world: World) -> None:
    for make in (_fail_in_the_middle, _fail_at_once):
        async with world.serving({"Method": ("stream-stream", echoes)}) as channel:
            call = open_call(channel, "stream-stream", request_iterator=make())
            with suppress(asyncio.CancelledError, grpc.RpcError):
                await collect(call)
            await look(world, call)


async def is_awaited_twice(world: World) -> None:
    async with world.serving({"Method": ("unary-unary", echoes)}) as channel:
        call = open_call(channel, "unary-unary", b"x")
        await world.client.tried("first", call)
        await world.client.tried("second", call)
        call.add_done_callback(lambda call: world.client.note("called back", call.done()))
        world.client.note("cancel", call.cancel())
        await world.client.tried("third", call)


async def is_asked_for_its_status_by_many(world: World) -> None:
    async with world.serving({"Method": ("unary-unary", echoes)}) as channel:
        call = open_call(channel, "unary-unary", b"x")
        world.client.note(*await asyncio.gather(call.code(), call.details(), call.code()))
        world.client.note(*map(pairs, await asyncio.gather(call.initial_metadata(), call.trailing_metadata())))
        await world.client.tried("response", call)


async def waits_for_its_connection(world: World) -> None:
    for kind in ALL:
        async with world.serving({"Method": (kind, echoes)}) as channel:
            call = open_call(channel, kind, b"x")
            if kind.startswith("stream"):
                await call.write(b"y")
                await world.client.tried("connection", call.wait_for_connection())
                await call.done_writing()
            else:
                await world.client.tried("connection", call.wait_for_connection())
            await world.client.tried("result", collect(call) if kind in MANY else call)


async def sees_metadata_before_messages(world: World) -> None:
    async def sends(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        await context.send_initial_metadata((("early", "yes"),))
        await world.signal("seen").wait()
        yield b"x"

    for kind in MANY:
        world.signal("seen").clear()
        async with world.serving({"Method": (kind, sends)}) as channel:
            call = open_call(channel, kind, b"x")
            world.client.note(pairs(await call.initial_metadata()), call.done())
            world.signal("seen").set()
            await world.client.tried("all", collect(call))


async def sees_deadlines(world: World) -> None:
    async def tells(world: World, request: Any, context: Any) -> AsyncGenerator[bytes]:
        remaining = context.time_remaining()
        # gRPC rounds it.
        world.server.note(remaining is not None and 0.9 * LONG < remaining < 1.1 * LONG)
        yield b"x"

    async with world.serving({"Method": ("unary-unary", tells)}) as channel:
        await world.client.tried("with", open_call(channel, "unary-unary", b"x", timeout=LONG))
        await world.client.tried("without", open_call(channel, "unary-unary", b"x"))


async def codes_messages(world: World) -> None:
    """A coder that fails: on each side, in each direction."""

    def fail(_: object) -> Any:
        raise ValueError("cannot be coded")

    async def answer(request: Any, context: Any) -> Any:
        world.server.note("request", request)
        return request

    coders = {"none": (None, None), "in": (fail, None), "out": (None, fail)}
    server = world.make_server()
    methods = {name: grpc.unary_unary_rpc_method_handler(answer, *pair) for name, pair in coders.items()}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
    server.add_registered_method_handlers(SERVICE, methods)
    await world.start(server)
    async with world.make_channel() as channel:
        for name, pair in coders.items():
            on_client = channel.unary_unary(f"/{SERVICE}/none", *reversed(pair), _registered_method=True)
            await world.client.tried(f"{name} on the client", on_client(b"x"))
            await world.client.tried(f"{name} on the server", channel.unary_unary(f"/{SERVICE}/{name}")(b"x"))
        await world.client.tried("unknown method", channel.unary_unary(f"/{SERVICE}/Unknown")(b"x"))
        await world.client.tried("unknown service", collect(channel.unary_stream("/no.Service/none")(b"x")))
    await server.stop(None)


async def closes_its_channel(world: World) -> None:
    for grace in (None, SHORT):
        world.signal("begun").clear()
        world.signal("over").clear()
        async with world.serving({"Method": ("unary-stream", waits)}) as channel:
            call = open_call(channel, "unary-stream", b"x")
            await world.signal("begun").wait()
            await channel.close(grace)
            await world.client.tried("all", collect(call))
            await look(world, call)
            await world.signal("over").wait()


BY_STREAM = [is_cancelled_behind_a_full_window, outlives_a_cancel, outlives_a_deadline]
SINGLE = [
    reads_to_the_end,
    sees_its_status_once_all_is_read,
    reads_after_its_deadline,
    is_cancelled_before_all_is_read,
    mixes_styles,
    talks_in_turns,
    writes_after_done_writing,
    writes_after_the_end,
    half_closes_without_a_message,
    iterates_over_requests,
    iterates_over_requests_that_fail,
    is_awaited_twice,
    is_asked_for_its_status_by_many,
    waits_for_its_connection,
    sees_metadata_before_messages,
    sees_deadlines,
    codes_messages,
    closes_its_channel,
]

CASES = {
    **{f"{case.__name__} in {kind}": partial(case, kind) for case in BY_KIND for kind in ALL},
    **{f"{case.__name__} in {kind}": partial(case, kind) for case in BY_STREAM for kind in MANY},
    **{case.__name__: case for case in SINGLE},
}
