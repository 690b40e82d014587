"""Lets gRPC's thread wake the event loop without ever waiting for it.

grpc.aio has one thread that asks the operating system what has come. It puts each event into a queue and writes a byte
to a socket that wakes the loop, which reads one byte and takes all events. So under load more bytes are written than
read, until the socket is full; then the thread waits for the loop, and asks for nothing: a ping is not answered, the
answer to one is not seen, and a peer that is well is given up. See docs/adr/0013.
"""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

from grpc._cython import cygrpc


def _make_pair() -> tuple[socket.socket, socket.socket]:
    read_end, write_end = socket.socketpair()
    # A byte that finds no room is not missed: those before it wake the loop, which then takes every event there is.
    # The loop goes on reading one byte at a time: an event that fails, as one of a loop that was closed does, leaves
    # those behind it to the next byte.
    write_end.setblocking(False)
    return read_end, write_end


def prepare() -> None:
    """Has it so in this process from the next time on that grpc.aio begins: before the first channel or server."""
    module: Any = cygrpc
    module.socket = SimpleNamespace(socketpair=_make_pair)
