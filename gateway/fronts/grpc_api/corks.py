"""Has the messages of one turn of the loop leave for a client in one packet. Knows neither events nor requests.

A step brings a token to each of a client's streams. gRPC sends each message by itself, and each wakes the client, which
has read it when the next one comes: that is most of what a stream costs either. TCP_CORK holds a turn's messages
together. gRPC keeps its sockets to itself, so they are found among this process's files, by their peer. It is a help on
which nothing depends: what is not found, as a Unix socket, is written to as ever. See docs/adr/0017.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from collections.abc import Generator, Sized

    Address = tuple[IPv4Address | IPv6Address, int]

_FILES = "/proc/self/fd"
# To look through more files takes a millisecond and longer, and of so many connections most have one stream.
MAX_FILES = 256
# The first of the messages that leave together waits for the last, and for those that are written to others meanwhile:
# some 40 µs each, so 5 ms at most, where 128 streams and more are written to.
MAX_MESSAGES = 16
MAX_CONNECTIONS = 8


class Connection:
    """Holds back what is written to one peer, where it has several streams and its socket can be found.

    Args:
        peer: as gRPC names it.
        connections: all that are being written to; with too many of them nothing is held back.

    Attributes:
        num_streams: those that are being written to it.
    """

    def __init__(self, peer: str, connections: Sized) -> None:
        self.num_streams = 0
        self._peer = peer
        self._connections = connections
        self._has_looked = False
        # gRPC may close it at any time. Another connection that has got the number is held back for this turn, too;
        # anything else refuses.
        self._descriptor: int | None = None
        self._num_held = 0

    def hold(self) -> None:
        """Holds back the next message, with those that follow it in this turn of the loop."""
        if self.num_streams < 2 or len(self._connections) > MAX_CONNECTIONS:
            return
        if not self._has_looked:
            self._has_looked = True
            self._descriptor = find_socket(self._peer)
        if self._descriptor is None:
            return
        if self._num_held == 0:
            asyncio.get_running_loop().call_soon(self._release)
            _set_cork(self._descriptor, 1)
        elif self._num_held % MAX_MESSAGES == 0:
            _set_cork(self._descriptor, 0)
            _set_cork(self._descriptor, 1)
        self._num_held += 1

    def _release(self) -> None:
        assert self._descriptor is not None
        self._num_held = 0
        _set_cork(self._descriptor, 0)


class Connections:
    """The connections to which streams are being written, by peer."""

    def __init__(self) -> None:
        self._connections: dict[str, Connection] = {}

    @contextmanager
    def writing_to(self, peer: str) -> Generator[Connection]:
        """Counts one more stream on the connection to a peer, as gRPC names it, and returns that connection."""
        connection = self._connections.setdefault(peer, Connection(peer, self._connections))
        connection.num_streams += 1
        try:
            yield connection
        finally:
            connection.num_streams -= 1
            if not connection.num_streams:
                del self._connections[peer]


def find_socket(peer: str) -> int | None:
    """Returns the descriptor of this process's TCP connection to a peer, as gRPC names it; None if it finds none."""
    try:
        address = _parse(peer)
        files = os.listdir(_FILES)
    except (ValueError, OSError):
        # A Unix socket, or no Linux.
        return None
    if len(files) > MAX_FILES:
        return None
    return next((descriptor for descriptor in map(int, files) if _find_peer(descriptor) == address), None)


def _parse(peer: str) -> Address:
    """Reads `ipv4:192.0.2.1:50051` or `ipv6:%5B2001:db8::1%5D:50051`; raises ValueError for anything else."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return ip_address(host.strip("[]")), int(port)


def _find_peer(descriptor: int) -> Address | None:
    with suppress(OSError), _borrowed(descriptor) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            host, port, *_ = connection.getpeername()
            address = ip_address(host)
            return getattr(address, "ipv4_mapped", None) or address, port
    return None


def _set_cork(descriptor: int, value: int) -> None:
    with suppress(OSError), _borrowed(descriptor) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, value)


@contextmanager
def _borrowed(descriptor: int) -> Generator[socket.socket]:
    """Makes a socket of a descriptor, which stays its owner's; raises OSError if it is none."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
