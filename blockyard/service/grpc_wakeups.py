"""Lets gRPC's thread wake the event loop without ever waiting for it.

grpc.aio has one polling thread. For each event it adds to a queue and writes a byte to a socket that wakes the loop;
the loop reads one byte and takes all events. So under load more bytes are written than read, until the socket is full;
then the thread blocks until the loop reads, and polls nothing: pings are neither answered nor their answers seen, and a
healthy peer's connection is closed. See docs/adr/0013.
"""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

from grpc._cython import cygrpc


def _make_pair() -> tuple[socket.socket, socket.socket]:
    read_end, write_end = socket.socketpair()
    # Dropping a byte when the socket is full is safe: earlier bytes wake the loop, which then takes every event. The
    # loop still reads one byte at a time: an event that fails, such as one of a closed loop, leaves the later events to
    # the next byte.
    write_end.setblocking(False)
    return read_end, write_end


def prepare() -> None:
    """Applies this to the process. Call it before the first grpc.aio channel or server is created."""
    module: Any = cygrpc
    module.socket = SimpleNamespace(socketpair=_make_pair)
