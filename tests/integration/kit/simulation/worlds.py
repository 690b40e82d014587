"""Where the conformance suite runs: the real grpc.aio over a Unix socket, and the simulated transport.

A case is a coroutine function of a world. It notes events on each side, and the suite compares them.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from tests.kit.chaos.fault_proxy import FaultProxy
from tests.kit.simulation.loop import SimLoop, run
from tests.kit.simulation.network import Network
from tests.kit.simulation.transport import SimTransport

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence

    Options = Sequence[tuple[str, Any]]
    Events = dict[str, list[Any]]
    Behaviour = Callable[["World", Any, Any], AsyncGenerator[bytes]]

SERVICE = "test.Service"
# How a method is called and answered: the kind of call, and whether a stream of responses is generated or written.
KINDS: dict[str, tuple[bool, bool, bool]] = {
    "unary-unary": (False, False, False),
    "unary-stream": (False, True, False),
    "unary-stream written": (False, True, True),
    "stream-unary": (True, False, False),
    "stream-stream": (True, True, False),
    "stream-stream written": (True, True, True),
}
_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def make_handler(world: World, kind: str, behaviour: Behaviour) -> Any:
    """Returns a handler whose responses a generator yields. One with one response returns the last."""
    takes_many, gives_many, writes = KINDS[kind]

    async def answer(request: Any, context: Any) -> Any:
        last = b""
        with world.handling():
            async for response in behaviour(world, request, context):
                last = response
                if writes:
                    await context.write(response)
        return None if writes else last

    async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
        with world.handling():
            async for response in behaviour(world, request, context):
                yield response

    return _MAKERS[takes_many, gives_many](generate if gives_many and not writes else answer)


class Side:
    """What one side of a case saw, in order."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def note(self, *event: Any) -> None:
        self.events.append(event)

    async def tried(self, label: str, work: Awaitable[Any]) -> Any:
        """Notes what came of something."""
        try:
            result = await work
        except grpc.aio.AioRpcError as error:
            metadata = pairs(error.initial_metadata()), pairs(error.trailing_metadata())
            self.note(label, "AioRpcError", error.code().name, plain(error.details()), *metadata)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - it is compared
            # gRPC's own errors name objects by their addresses.
            self.note(label, type(error).__name__, "" if isinstance(error, grpc.aio.InternalError) else str(error))
        else:
            self.note(label, "EOF" if result is grpc.aio.EOF else result)
            return result


class TooBusy(Exception):
    """The machine was so slow that a deadline came before what the case is about."""


class World:
    """One of the two. `deadline`: seconds that suffice to begin a call, but not to wait for long."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.client, self.server = Side(), Side()
        self._signals: dict[str, asyncio.Event] = {}
        self._num_handlers = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def handling(self) -> Iterator[None]:
        self._num_handlers += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_handlers -= 1
            if not self._num_handlers:
                self._idle.set()

    async def stop(self, server: Any) -> None:
        """Stops a server, and waits for its handlers, which gRPC does not."""
        await server.stop(None)
        await self._idle.wait()

    def signal(self, name: str) -> asyncio.Event:
        """Returns an event of a name, by which the two sides of a case wait for each other."""
        return self._signals.setdefault(name, asyncio.Event())

    def make_server(self, options: Options = (), interceptors: Sequence[Any] = ()) -> Any:
        raise NotImplementedError

    def make_channel(self, options: Options = ()) -> Any:
        raise NotImplementedError

    async def start(self, server: Any) -> None:
        """Starts a server where `make_channel` connects."""
        raise NotImplementedError

    @asynccontextmanager
    async def breakable(self) -> AsyncIterator[None]:
        """Lets `cut` and `partition` break what `make_channel` connects to within."""
        yield

    def cut(self) -> None:
        """Loses every connection."""
        raise NotImplementedError

    def partition(self) -> Callable[[], None]:
        """Holds back everything until the returned function is called."""
        raise NotImplementedError

    @asynccontextmanager
    async def serving(
        self,
        handlers: Mapping[str, tuple[str, Behaviour]],
        options: Options = (),
        interceptors: Sequence[Any] = (),
        channel_options: Options = (),
    ) -> AsyncIterator[Any]:
        """Serves methods by kind and behaviour, and gives a channel."""
        server = self.make_server(options, interceptors)
        methods = {name: make_handler(self, kind, behaviour) for name, (kind, behaviour) in handlers.items()}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        await self.start(server)
        async with self.make_channel(channel_options) as channel:
            yield channel
        await self.stop(server)


class RealWorld(World):
    def __init__(self, folder: str, deadline: float) -> None:
        super().__init__(deadline)
        self._address = f"unix:{folder}/socket"
        self._proxy: FaultProxy | None = None

    def make_server(self, options: Options = (), interceptors: Sequence[Any] = ()) -> Any:
        return grpc.aio.server(options=options, interceptors=interceptors)

    def make_channel(self, options: Options = ()) -> Any:
        address = self._address if self._proxy is None else self._proxy.address
        # A connection of an earlier channel must not be used.
        return grpc.aio.insecure_channel(address, [*options, ("grpc.use_local_subchannel_pool", 1)])

    @asynccontextmanager
    async def breakable(self) -> AsyncIterator[None]:
        async with FaultProxy(self._address, f"{self._address}-proxy") as self._proxy:
            yield

    def cut(self) -> None:
        assert self._proxy is not None
        self._proxy.end()

    def partition(self) -> Callable[[], None]:
        assert self._proxy is not None
        self._proxy.partition()
        return self._proxy.heal

    async def start(self, server: Any) -> None:
        server.add_insecure_port(self._address)
        await server.start()


class SimulatedWorld(World):
    def __init__(self, loop: SimLoop) -> None:
        super().__init__(deadline=0.05)
        self.network = Network(loop)
        self._server, self._client = SimTransport(self.network, "server"), SimTransport(self.network, "client")

    def make_server(self, options: Options = (), interceptors: Sequence[Any] = ()) -> Any:
        return self._server.server(options, interceptors)

    def make_channel(self, options: Options = ()) -> Any:
        return self._client.channel("server:50051", options)

    def cut(self) -> None:
        for connection in self.network.connections():
            self.network.break_connection(connection)

    def partition(self) -> Callable[[], None]:
        return self.network.block(["client"], ["server"]).lift

    async def start(self, server: Any) -> None:
        server.add_insecure_port("0.0.0.0:50051")
        await server.start()


def pairs(metadata: Any) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in metadata or () if key != "user-agent"]


def plain(details: str | None) -> str | None:
    """Leaves out of details what names an address, or says whether the error met a stream."""
    if not details:
        return details
    if details.startswith("Stream removed ("):
        return details[len("Stream removed (") : -1]
    return details.partition("; last error")[0]


def events_of_real(case: Any, deadline: float = 0.05) -> Events:
    async def main(folder: str) -> Events:
        world = RealWorld(folder, deadline)
        await asyncio.wait_for(case(world), 60)
        return {"client": world.client.events, "server": world.server.events}

    logging.disable(logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory(prefix="by") as folder:
            return asyncio.run(main(folder))
    except TooBusy:
        return events_of_real(case, 4 * deadline)
    finally:
        logging.disable(logging.NOTSET)


def events_of_simulated(case: Any, seed: int = 0) -> Events:
    async def main() -> Events:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        world = SimulatedWorld(loop)
        await asyncio.wait_for(case(world), 3600)
        return {"client": world.client.events, "server": world.server.events}

    logging.disable(logging.CRITICAL)
    try:
        return run(main(), seed).result
    finally:
        logging.disable(logging.NOTSET)
