"""A simulated grpc.aio channel: grpc.aio's own objects above a connection of the simulated network."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc._cython import cygrpc
from grpc.aio._call import StreamStreamCall, StreamUnaryCall, UnaryStreamCall, UnaryUnaryCall
from grpc.aio._channel import Channel

from tests.kit.simulation.client_call import ClientCall
from tests.kit.simulation.streams import GOAWAY, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.kit.simulation.loop import Owner
    from tests.kit.simulation.network import End, Network

IDLE, CONNECTING, READY, TRANSIENT_FAILURE, SHUTDOWN = (
    state.value[0]
    for state in (
        grpc.ChannelConnectivity.IDLE,
        grpc.ChannelConnectivity.CONNECTING,
        grpc.ChannelConnectivity.READY,
        grpc.ChannelConnectivity.TRANSIENT_FAILURE,
        grpc.ChannelConnectivity.SHUTDOWN,
    )
)
_BACKOFF_FACTOR, _BACKOFF_JITTER = 1.6, 0.2
# How a proxy resets calls, and how gRPC reports it.
_CODES = {
    "Received RST_STREAM with error code 8": grpc.StatusCode.CANCELLED,
    "Received RST_STREAM with error code 2": grpc.StatusCode.INTERNAL,
}
RESETS = tuple(_CODES)


class _Connection:
    """One connection to a server, and the calls on it."""

    def __init__(self, connector: Connector, end: End) -> None:
        self._connector = connector
        self.end = end
        self._calls: dict[int, ClientCall] = {}
        self._num_calls = 0
        self._takes_calls = True
        end.on_connected = partial(connector.on_connected, self)
        end.on_message = self._on_frame
        end.on_lost = self.on_lost

    def begin(self, call: ClientCall) -> None:
        self._num_calls = number = self._num_calls + 1
        self._calls[number] = call
        call.begin(self.end, number, partial(self._forget, number))

    def _forget(self, number: int) -> None:
        self._calls.pop(number, None)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._takes_calls and not self._calls:
            self.end.close()

    def _on_frame(self, frame: tuple[Any, ...]) -> None:
        kind, number, *values = frame
        if kind is GOAWAY:
            self._takes_calls = False
            self._connector.on_disconnected(self)
            for unseen in [number for number in self._calls if number > values[0]]:
                self._calls.pop(unseen).begin_again()
            self._close_if_unused()
        elif number in self._calls:
            self._calls[number].on_frame(kind, *values)

    def on_lost(self, reason: str) -> None:
        self._connector.on_disconnected(self, reason)
        for call in list(self._calls.values()):
            call.fail(_CODES.get(reason, grpc.StatusCode.UNAVAILABLE), reason)


class Connector:
    """The core of a channel: one address, to which it connects when a call needs it, and again after a pause.

    grpc.aio's `Channel` holds it in place of its `AioChannel`, whose methods have these names.
    """

    def __init__(self, network: Network, node: str, owner: Owner, address: str, options: Options) -> None:
        self.options = options
        self._network = network
        self._node = node
        self._owner = owner
        self._address = address
        self._loop = asyncio.get_running_loop()
        self._random = network.random
        self._state = IDLE
        self._watchers: list[asyncio.Future[None]] = []
        # The connection that takes calls, or the one that is being made.
        self._connection: _Connection | None = None
        self._waiting: dict[ClientCall, None] = {}
        self._failure = ""
        self._backoff = options.initial_backoff_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._retry_at = 0.0

    # What grpc.aio's channel calls.

    def call(self, method: str, timeout: float | None, wait_for_ready: bool) -> ClientCall:
        if self._state == SHUTDOWN:
            raise cygrpc.UsageError("Channel is closed.")
        return ClientCall(self, method, timeout, wait_for_ready)

    def closed(self) -> bool:
        return self._state == SHUTDOWN

    def closing(self) -> None:
        """grpc.aio calls this when a close begins; calls are refused from `close` on."""

    @property
    def is_gone(self) -> bool:
        """Whether the process has been killed, or the simulation is over; Python may drop its objects afterwards."""
        return self._loop.is_closed() or not self._owner.alive

    def close(self) -> None:
        if self.is_gone:
            return
        self._cancel_timer()
        self._set_state(SHUTDOWN)
        for call in list(self._waiting):
            call.fail(grpc.StatusCode.CANCELLED, "Channel closed!")
        if self._connection is not None:
            self._connection.end.close()
            self._connection = None

    def check_connectivity_state(self, try_to_connect: bool) -> int:
        state = self._state
        if try_to_connect and state == IDLE:
            self._connect()
        return state

    async def watch_connectivity_state(self, last_state: int, _: None) -> bool:
        if self._state == SHUTDOWN:
            raise cygrpc.UsageError("Channel is closed.")
        if self._state == last_state:
            watcher = self._loop.create_future()
            self._watchers.append(watcher)
            await watcher
        return True

    # What calls ask.

    def start(self, call: ClientCall) -> None:
        """Begins a call as soon as there is a connection; fails it where there is none and it does not wait."""
        if self._state == READY and self._connection is not None:
            self._connection.begin(call)
        elif self._state == TRANSIENT_FAILURE and not call.wait_for_ready:
            call.fail(grpc.StatusCode.UNAVAILABLE, self._failure)
        else:
            self._waiting[call] = None
            if self._state == IDLE:
                self._connect()

    def forget(self, call: ClientCall) -> None:
        """Does not begin a call that waits."""
        self._waiting.pop(call, None)

    # Connecting. After a first failure the state stays TRANSIENT_FAILURE until a connection stands.

    def _connect(self) -> None:
        if self._state != TRANSIENT_FAILURE:
            self._set_state(CONNECTING)
        jitter = self._random.uniform(1 - _BACKOFF_JITTER, 1 + _BACKOFF_JITTER)
        self._retry_at = self._loop.time() + self._backoff * jitter
        self._backoff = min(self._backoff * _BACKOFF_FACTOR, self.options.max_backoff_seconds)
        self._connection = connection = _Connection(self, self._network.connect(self._node, self._owner, self._address))
        self._timer = self._loop.call_later(self.options.connect_seconds, self._give_up, connection)

    def _give_up(self, connection: _Connection) -> None:
        connection.end.close()
        self._on_failure("connection attempt timed out before receiving SETTINGS frame")

    def on_connected(self, connection: _Connection) -> None:
        self._cancel_timer()
        self._backoff = self.options.initial_backoff_seconds
        self.options.keep_alive(connection.end)
        self._set_state(READY)
        waiting, self._waiting = self._waiting, {}
        for call in waiting:
            connection.begin(call)

    def on_disconnected(self, connection: _Connection, reason: str = "") -> None:
        if connection is not self._connection:
            return
        if self._state == READY:
            self._connection = None
            self._set_state(IDLE)
        elif self._state != SHUTDOWN:
            self._on_failure(reason)

    def _on_failure(self, reason: str) -> None:
        self._cancel_timer()
        self._connection = None
        self._failure = f"failed to connect to all addresses; last error: UNKNOWN: {self._address}: {reason}"
        self._set_state(TRANSIENT_FAILURE)
        for call in [call for call in self._waiting if not call.wait_for_ready]:
            call.fail(grpc.StatusCode.UNAVAILABLE, self._failure)
        self._timer = self._loop.call_at(max(self._retry_at, self._loop.time()), self._connect)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set_state(self, state: int) -> None:
        self._state = state
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)


class SimChannel(Channel):
    """A channel of a simulated process. Client interceptors, compression and call credentials are left out.

    A call that is dropped goes on, since grpc.aio ends it when the garbage collector runs, which does not repeat.
    """

    def __init__(
        self, network: Network, node: str, owner: Owner, address: str, options: Sequence[tuple[str, Any]] | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._channel = Connector(network, node, owner, address, Options(options))
        # grpc.aio has a set of weak references, whose order would not repeat.
        self._calls: dict[Any, None] = {}

    def unary_unary(self, method: str, *coders: Any, **named: Any) -> Any:
        make = self._maker(UnaryUnaryCall, method, *coders, **named)
        return lambda request, **options: make(request, **options)

    def unary_stream(self, method: str, *coders: Any, **named: Any) -> Any:
        make = self._maker(UnaryStreamCall, method, *coders, **named)
        return lambda request, **options: make(request, **options)

    def stream_unary(self, method: str, *coders: Any, **named: Any) -> Any:
        make = self._maker(StreamUnaryCall, method, *coders, **named)
        return lambda request_iterator=None, **options: make(request_iterator, **options)

    def stream_stream(self, method: str, *coders: Any, **named: Any) -> Any:
        make = self._maker(StreamStreamCall, method, *coders, **named)
        return lambda request_iterator=None, **options: make(request_iterator, **options)

    def _maker(
        self,
        kind: Any,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Callable[..., Any]:
        """Returns what makes calls of a method."""

        def make(
            request: Any,
            *,
            timeout: float | None = None,
            metadata: Any = None,
            wait_for_ready: bool | None = None,
        ) -> Any:
            maker = _CallMaker(self._channel, timeout)
            sent = metadata if isinstance(metadata, grpc.aio.Metadata) else grpc.aio.Metadata(*(metadata or ()))
            coders = request_serializer, response_deserializer
            call = kind(request, None, sent, None, wait_for_ready, maker, method, *coders, self._loop)
            self._calls[call] = None
            call.add_done_callback(lambda call: self._calls.pop(call, None))
            return call

        return make

    async def _close(self, grace: float | None) -> None:
        if self._channel.closed():
            return
        calls = list(self._calls)
        if grace and calls:
            await asyncio.wait([asyncio.create_task(call.code()) for call in calls], timeout=grace)
        for call in calls:
            call.cancel()
        self._channel.close()


class _CallMaker:
    """Stands for the channel where grpc.aio's call object makes its core, to hand the timeout on in virtual time."""

    def __init__(self, connector: Connector, timeout: float | None) -> None:
        self._connector = connector
        self._timeout = timeout

    def call(self, method: str, _deadline: None, _credentials: None, wait_for_ready: bool | None, _handle: int) -> Any:
        return self._connector.call(method, self._timeout, bool(wait_for_ready))
