"""A simulated network: ordered connections between the processes of named nodes, and what goes wrong on them.

A node is a machine with a name, which is also the host of its addresses: `worker-0:50053`. A process of a node listens
at addresses and connects to them. A connection has two ends, each with an owner (see `tests.kit.simulation.loop`), in
whose context its callbacks run: nothing is told to a killed process, and a frozen one learns everything when it thaws.

What is sent on one end arrives at the other in order, each message after a latency that is drawn and the time that its
bytes take. The network knows a message only by its size in bytes.

Faults:

- `block` keeps messages from passing, one way or both, between two sets of nodes, until it is lifted; then they arrive,
  as after TCP's retransmissions. So it is a partition, and it holds back what was sent.
- `delay` adds to the latency, `flap` blocks and lifts in turns.
- `break_connection` loses a connection. Of what is under way some first messages arrive and the others do not, the one
  that was cut in the middle among them. Each end notices at a time of its own.
- `kill` ends a process's connections as the end of the process does; `kill(owner, silently=True)` as a loss of power:
  nobody is told. An end notices by its keepalive, if it has one: it asks when it has heard nothing for some time, and
  counts the connection as lost when no answer comes.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection, Iterable

    from tests.kit.simulation.loop import Owner, SimLoop

LATENCY_SECONDS = (50e-6, 500e-6)
BYTES_PER_SECOND = 1e9
# What arrives within this time is received together.
AT_ONCE_SECONDS = 2e-6
# How long until an end notices that its connection was broken.
NOTICE_SECONDS = (0.0, 0.2)
FIRST_FREE_PORT = 40_000
_THIS_NODE = ("", "0.0.0.0", "127.0.0.1", "::", "::1", "localhost")
_SMALL_BYTES = 64


class AddressTaken(Exception):
    """Another process listens at the address, or the host is another node."""


@dataclass(frozen=True)
class _Lost:
    """The last message of a connection: the other end's, or the network's."""

    reason: str


class _Connect:
    """The first message of the end that connects."""


class _Accepted:
    """The first message of the end that was connected to."""


class _Ping:
    """Asks whether the other end's process is there."""


class _Pong:
    """Answers it."""


_CONNECT, _ACCEPTED, _PING, _PONG = _Connect(), _Accepted(), _Ping(), _Pong()


def _ignore(*_: object) -> None: ...


class End:
    """One end of a connection. Its callbacks run in its owner's context.

    Attributes:
        node: its node's name.
        address: where it listens, or whence it connected.
        peer: the other end.
        on_connected: called when the connection stands.
        on_message: called with each message.
        on_lost: called once with a reason, unless this end closed the connection.
        is_open: whether this end has neither closed nor lost the connection.
    """

    on_connected: Callable[[], None]
    on_message: Callable[[Any], None]
    on_lost: Callable[[str], None]
    peer: End

    def __init__(self, network: Network, node: str, address: str, owner: Owner, connects: bool) -> None:
        self.node = node
        self.address = address
        self.on_connected = self.on_message = self.on_lost = _ignore
        self._connects = connects
        self._network = network
        self._loop = network.loop
        self.is_open = True
        # Messages under way to this end, each with the time of its arrival, and the timer of the first.
        self._incoming: deque[tuple[float, Any]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_cut = False
        self._heard_at = self._last_put_at = self._loop.time()
        self.assign(owner)

    def assign(self, owner: Owner) -> None:
        self.owner = owner
        self._context = self._loop.context_of(owner)

    def send(self, message: Any, num_bytes: int = _SMALL_BYTES) -> None:
        """Sends a message. If the connection is lost, the other end closed it or the owner is dead, it vanishes."""
        if self.is_open and self.owner.alive and not self.peer._is_cut:
            self.peer._put(message, num_bytes / BYTES_PER_SECOND)

    def close(self, reason: str = "closed by the peer") -> None:
        """Ends the connection. The other end first gets what was sent."""
        if self.is_open:
            self.send(_Lost(reason))
            self._end()

    def keep_alive(self, interval_seconds: float, timeout_seconds: float) -> None:
        """Asks for a sign of the other end's process whenever nothing was heard for `interval_seconds`."""
        if not self.is_open:
            return
        now, due = self._loop.time(), self._heard_at + interval_seconds
        context = self._context
        if now < due:
            self._loop.call_at(due, self.keep_alive, interval_seconds, timeout_seconds, context=context)
        else:
            self.send(_PING)
            self._loop.call_later(timeout_seconds, self._judge, now, interval_seconds, timeout_seconds, context=context)

    def _judge(self, asked_at: float, interval_seconds: float, timeout_seconds: float) -> None:
        if self.is_open and self._heard_at < asked_at:
            self._loop.note(f"no answer from {self.peer.address} to {self.node}")
            self.send(_Lost("the peer's keepalive failed"))
            self._lose("ping timeout")
        self.keep_alive(interval_seconds, timeout_seconds)

    def _put(self, message: Any, seconds: float) -> None:
        """Puts a message on its way to this end, on which it takes `seconds` beside the latency."""
        now = self._loop.time()
        if self._incoming and self._last_put_at == now:
            # Behind what was sent in the same instant.
            arrival = self._incoming[-1][0]
        else:
            arrival = now + self._network.draw_latency(self.peer.node, self.node)
            if self._incoming:
                arrival = max(arrival, self._incoming[-1][0])
        self._last_put_at = now
        self._incoming.append((arrival + seconds, message))
        self._wait_for_first()

    def _wait_for_first(self) -> None:
        if self._timer is None and self._incoming and not self._network.is_blocked(self.peer.node, self.node):
            self._timer = self._loop.call_at(self._incoming[0][0], self._arrive, context=self._context)

    def _arrive(self) -> None:
        """Receives what is there. The first message, for which the timer was, may have been cut."""
        self._timer = None
        if not self._network.is_blocked(self.peer.node, self.node):
            now = self._loop.time()
            while self._incoming and self._incoming[0][0] <= now + AT_ONCE_SECONDS:
                self._heard_at = now
                self._receive(self._incoming.popleft()[1])
            self._wait_for_first()

    def _receive(self, message: Any) -> None:
        if message is _PING:
            self.send(_PONG)
        elif message is _CONNECT:
            self._network._accept(self)
        elif message is _ACCEPTED:
            self.on_connected()
        elif isinstance(message, _Lost):
            self._lose(message.reason)
        elif message is not _PONG:
            self.on_message(message)

    def _lose(self, reason: str) -> None:
        self._end()
        self.on_lost(reason)

    def _end(self) -> None:
        self.is_open, self._is_cut = False, True
        self._incoming.clear()
        self._network._forget(self)

    def _cut(self, reason: str, seconds: float) -> None:
        """Loses what is under way to this end from a message on that is drawn; the end notices after `seconds`."""
        if self._is_cut:
            return
        for _ in range(self._network.random.randint(0, len(self._incoming))):
            self._incoming.pop()
        self._put(_Lost(reason), seconds)
        self._is_cut = True


@dataclass(frozen=True)
class _Listener:
    node: str
    owner: Owner
    on_connection: Callable[[End], None]


class Block:
    """Messages from some nodes to others that do not pass, until `lift` is called."""

    def __init__(self, network: Network, pairs: Collection[tuple[str, str]]) -> None:
        self._network = network
        self._pairs = pairs
        self.is_lifted = False
        network._blocked.update(pairs)

    def lift(self) -> None:
        if not self.is_lifted:
            self.is_lifted = True
            self._network._lift(self._pairs)


class Network:
    """See the module.

    Attributes:
        hosts: the node of each other name for one, such as an IP address.
        latency_seconds: the shortest and the longest latency of a message.
    """

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.random = loop.random_for("network")
        self.latency_seconds = LATENCY_SECONDS
        self.hosts: dict[str, str] = {}
        self._listeners: dict[str, _Listener] = {}
        # The open ends, in the order in which they were made.
        self._ends: dict[End, None] = {}
        self._blocked: Counter[tuple[str, str]] = Counter()
        self._delays: dict[tuple[str, str], float] = {}
        self._num_ports = 0

    # Addresses and connections.

    def resolve(self, node: str, address: str) -> str:
        """Returns `node:port` for an address as a process of a node writes it."""
        host, _, port = address.rpartition(":")
        host = host.rpartition("/")[2].strip("[]")
        host = node if host in _THIS_NODE else self.hosts.get(host, host)
        return f"{host}:{port}"

    def listen(self, node: str, owner: Owner, address: str, on_connection: Callable[[End], None]) -> str:
        """Listens at an address of a node, and returns it; port 0: a free one. Raises AddressTaken."""
        address = self.resolve(node, address)
        host, _, port = address.rpartition(":")
        if port == "0":
            self._num_ports += 1
            address = f"{host}:{FIRST_FREE_PORT + self._num_ports}"
        present = self._listeners.get(address)
        if host != node or (present is not None and present.owner.alive):
            raise AddressTaken(address)
        self._listeners[address] = _Listener(node, owner, on_connection)
        return address

    def stop_listening(self, address: str) -> None:
        self._listeners.pop(address, None)

    def connect(self, node: str, owner: Owner, address: str) -> End:
        """Begins to connect. The end's callbacks must be set before the next await.

        Where nobody listens, `on_lost` is called. Where the way is blocked, or the process there is frozen, nothing is.
        """
        address = self.resolve(node, address)
        self._num_ports += 1
        end = End(self, node, f"{node}:{FIRST_FREE_PORT + self._num_ports}", owner, connects=True)
        host = address.rpartition(":")[0]
        # Where no process listens, the node's system answers.
        peer_owner = self._listeners[address].owner if self._listens(address) else self.loop.main
        end.peer = End(self, host, address, peer_owner, connects=False)
        end.peer.peer = end
        self._ends[end] = self._ends[end.peer] = None
        end.send(_CONNECT)
        return end

    def _listens(self, address: str) -> bool:
        return address in self._listeners and self._listeners[address].owner.alive

    def _accept(self, end: End) -> None:
        if not self._listens(end.address):
            end.close("Connection refused")
            return
        listener = self._listeners[end.address]
        self.loop.note(f"connection from {end.peer.address} to {end.address}")
        end.assign(listener.owner)
        end.send(_ACCEPTED)
        self.loop.call_soon(listener.on_connection, end, context=end._context)

    def _forget(self, end: End) -> None:
        self._ends.pop(end, None)

    def connections(self) -> list[End]:
        """Returns the open ends of those that connected, in the order in which they did."""
        return [end for end in self._ends if end._connects]

    # Latency.

    def draw_latency(self, source: str, target: str) -> float:
        return self.random.uniform(*self.latency_seconds) + self._delays.get((source, target), 0.0)

    def delay(self, sources: Iterable[str], targets: Collection[str], seconds: float) -> None:
        """Adds to the latency of each message from one of some nodes to one of others; 0: no longer."""
        for source in sources:
            for target in targets:
                self._delays[source, target] = seconds

    # Faults.

    def is_blocked(self, source: str, target: str) -> bool:
        return bool(self._blocked) and self._blocked[source, target] > 0

    def is_delayed(self, one: str, other: str) -> bool:
        """Whether messages between two nodes take longer than usual, one way or both."""
        return self._delays.get((one, other), 0.0) > 0 or self._delays.get((other, one), 0.0) > 0

    def block(self, sources: Iterable[str], targets: Collection[str], both_ways: bool = True) -> Block:
        """Keeps messages of some nodes from others until the returned block is lifted. A node reaches itself always."""
        pairs = {(source, target): None for source in sources for target in targets if source != target}
        if both_ways:
            pairs.update({(target, source): None for source, target in list(pairs)})
        self.loop.note(f"block {sorted(pairs)}")
        return Block(self, list(pairs))

    def _lift(self, pairs: Collection[tuple[str, str]]) -> None:
        self._blocked.subtract(pairs)
        self.loop.note(f"lift {sorted(pairs)}")
        for end in list(self._ends):
            if (end.peer.node, end.node) in pairs and not self.is_blocked(end.peer.node, end.node):
                end._wait_for_first()

    def flap(self, sources: Iterable[str], targets: Collection[str], seconds: float, times: int) -> None:
        """Blocks both ways for `seconds`, lifts for as long, and so on."""
        if times:
            block = self.block(sources, targets)
            self.loop.call_later(seconds, block.lift)
            self.loop.call_later(2 * seconds, self.flap, sources, targets, seconds, times - 1)

    def break_connection(self, end: End, reason: str = "Connection reset by peer") -> None:
        """Loses a connection. Each end notices at a time of its own."""
        self.loop.note(f"break {end.address} to {end.peer.address}")
        for side in (end, end.peer):
            side._cut(reason, self.random.uniform(*NOTICE_SECONDS))

    def kill(self, owner: Owner, silently: bool = False) -> None:
        """Kills a process, with its connections and listeners. `silently`: nobody is told, as if its power failed."""
        self.loop.note(f"kill {owner.name}")
        self.loop.kill(owner)
        for end in list(self._ends):
            if end.owner is not owner:
                continue
            if silently:
                end.peer._incoming.clear()
            else:
                end.peer._cut("Socket closed", 0.0)
            end._end()
