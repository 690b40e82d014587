"""A simulated grpc.aio server: connections, the calls on them, and stopping."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc._cython import cygrpc
from grpc.aio._server import Server

from tests.kit.simulation.network import AddressTaken
from tests.kit.simulation.server_call import CallDetails, ServerCall
from tests.kit.simulation.streams import GOAWAY, HEADERS, Options, Stream

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kit.simulation.loop import Owner
    from tests.kit.simulation.network import End, Network

_READY, _RUNNING, _STOPPING, _STOPPED = range(4)


class _Connection:
    """A client's connection, and the calls on it."""

    def __init__(self, server: ServerCore, end: End) -> None:
        self._server = server
        self._end = end
        self.calls: dict[int, ServerCall] = {}
        self.last_number = 0
        end.on_message = self._on_frame
        end.on_lost = self._on_lost
        server.options.keep_alive(end)

    def _on_frame(self, frame: tuple[Any, ...]) -> None:
        kind, number, *values = frame
        if kind is HEADERS:
            method, metadata, timeout = values
            stream = Stream(self._end, number)
            stream.forget_sent()
            self._server.start_call(self, stream, CallDetails(method, metadata), timeout, self._end.peer.address)
        elif number in self.calls:
            self.calls[number].on_frame(kind, *values)

    def _on_lost(self, _: str) -> None:
        self._server.connections.pop(self, None)
        for call in list(self.calls.values()):
            call.cancel()

    def go_away(self) -> None:
        """Says that later calls will not be seen."""
        self._end.send((GOAWAY, 0, self.last_number))

    def close(self) -> None:
        self._end.close("Socket closed")


class ServerCore:
    """The core of a server.

    grpc.aio's `Server` holds it in place of its `AioServer`, whose methods have these names.
    """

    def __init__(
        self, network: Network, node: str, owner: Owner, options: Options, interceptors: Sequence[Any]
    ) -> None:
        self.options = options
        self.interceptors = interceptors
        # In the order in which they came.
        self.connections: dict[_Connection, None] = {}
        self._network = network
        self._node = node
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._addresses: list[str] = []
        self._generic_handlers: list[grpc.GenericRpcHandler[Any, Any]] = []
        self._registered_handlers: dict[str, Any] = {}
        self._status = _READY
        self._calls: dict[ServerCall, None] = {}
        self._started = asyncio.Event()
        self._unused = asyncio.Event()
        self._unused.set()
        self._stopped = asyncio.Event()

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]) -> None:
        self._generic_handlers.extend(handlers)

    def add_registered_method_handlers(self, handlers: dict[str, Any]) -> None:
        self._registered_handlers.update(handlers)

    def find_handler(self, details: Any) -> Any:
        if details.method in self._registered_handlers:
            return self._registered_handlers[details.method]
        found = (handler.service(details) for handler in self._generic_handlers)
        return next((handler for handler in found if handler is not None), None)

    def add_insecure_port(self, address: bytes) -> int:
        try:
            listening = self._network.listen(self._node, self._owner, address.decode(), self._on_connection)
        except AddressTaken:
            return 0
        self._addresses.append(listening)
        return int(listening.rpartition(":")[2])

    def _on_connection(self, end: End) -> None:
        self.connections[_Connection(self, end)] = None

    def is_running(self) -> bool:
        # grpc.aio asks when it drops a server, perhaps one of a killed process.
        return self._status == _RUNNING and self._owner.alive and not self._loop.is_closed()

    async def start(self) -> None:
        if self._status == _RUNNING:
            return
        if self._status != _READY:
            raise cygrpc.UsageError("Server not in ready state")
        self._status = _RUNNING
        self._started.set()

    def start_call(
        self, connection: _Connection, stream: Stream, details: CallDetails, timeout: float | None, peer: str
    ) -> None:
        if self._status >= _STOPPING:
            # The client learns it by GOAWAY.
            return
        connection.last_number = stream.number
        call = connection.calls[stream.number] = ServerCall(self, stream, details, timeout, peer)
        call.task.add_done_callback(lambda _: self._on_end(connection, call))
        self._calls[call] = None
        self._unused.clear()

    async def until_started(self) -> None:
        await self._started.wait()

    def _on_end(self, connection: _Connection, call: ServerCall) -> None:
        del self._calls[call], connection.calls[call.stream.number]
        if not self._calls:
            self._unused.set()

    async def shutdown(self, grace: float | None) -> None:
        for address in self._addresses:
            self._network.stop_listening(address)
        if self._status in (_READY, _STOPPED):
            return
        if self._status == _RUNNING:
            self._status = _STOPPING
            for connection in self.connections:
                connection.go_away()
        try:
            async with asyncio.timeout(grace or 0):
                await self._unused.wait()
        except TimeoutError:
            # As in gRPC, handlers that go on when they are cancelled are not waited for.
            for call in list(self._calls):
                call.cancel(grpc.StatusCode.UNAVAILABLE, "Cancelling all calls")
            await asyncio.sleep(0)
        self._status = _STOPPED
        for connection in list(self.connections):
            connection.close()
        self.connections.clear()
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None) -> bool:  # noqa: ASYNC109 - as in grpc.aio
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False


class SimServer(Server):
    """A server of a simulated process. TLS, compression and limits of concurrent calls are left out."""

    def __init__(
        self,
        network: Network,
        node: str,
        owner: Owner,
        options: Sequence[tuple[str, Any]] | None,
        interceptors: Sequence[Any] | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = ServerCore(network, node, owner, Options(options), tuple(interceptors or ()))
