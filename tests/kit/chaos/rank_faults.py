"""What a rank of a replica does to itself when it gets a signal, for tests: to its connections with other ranks, and to
what it says of its steps.

From inside, since nobody else has its sockets: a proxy cannot stand between ranks, which tell each other where they
listen, and packet filters of the kernel ask for rights that a container need not have.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.step import Step

# Where ranks of a cluster reach each other: by this their connections are known from others of the process.
GROUP_HOST = "127.0.0.2"
# Two signals that a process which does not heed them yet ignores.
CUT = signal.SIGURG
"""Ends all connections to other ranks."""
FREEZE = signal.SIGWINCH
"""Lets nothing come in any more over the connections to other ranks, which stay open."""
DIFFER = signal.SIGUSR1
"""Has the next step leave another digest than it should."""

# <asm-generic/socket.h>; a filter of one instruction, which keeps no byte of any packet.
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)


def obey_signals() -> None:
    """Has this worker do to itself what signals say. To be called in its main thread, before it starts."""
    signal.signal(CUT, lambda *_: _cut())
    signal.signal(FREEZE, lambda *_: _freeze())
    _differ_at(DIFFER)


def _cut() -> None:
    for connection in _connections():
        connection.shutdown(socket.SHUT_RDWR)


def _freeze() -> None:
    instructions = ctypes.create_string_buffer(_DROP)
    program = struct.pack("HP", 1, ctypes.addressof(instructions))
    for connection in _connections():
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _connections() -> Iterator[socket.socket]:
    """The connections to other ranks, as sockets of their own."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family == socket.AF_INET and GROUP_HOST in (
                    connection.getsockname()[0],
                    connection.getpeername()[0],
                ):
                    yield connection


def _differ_at(number: int) -> None:
    from worker_service.steps.rank_steps import StepDigest

    add_inputs = StepDigest.add_inputs
    is_due = False

    def ask(*_: object) -> None:
        nonlocal is_due
        is_due = True

    def add(self: StepDigest, step: Step, forward_batch: ForwardBatch) -> None:
        nonlocal is_due
        add_inputs(self, step, forward_batch)
        if is_due:
            is_due = False
            self._inputs = bytes(reversed(self._inputs))

    StepDigest.add_inputs = add
    signal.signal(number, ask)
