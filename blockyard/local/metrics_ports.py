"""Chooses the metrics ports of a scheduler and workers that run together. Starts no server."""

from __future__ import annotations

import itertools
import socket

from blockyard.service.servers import PortTaken

HOST = "127.0.0.1"
FIRST_SCHEDULER_PORT, FIRST_WORKER_PORT = 50062, 50072
# The number of ports to try: as many systems may run on one machine.
_MAX_TRIES = 1000


class MetricsPorts:
    """The metrics ports of one system. Chosen ports are reserved until `close`.

    A chosen port stays free until its service listens, seconds later. To keep other systems that start meanwhile from
    choosing it, the port is reserved by a UDP socket of the same number, which nothing else uses.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []
        self._given: set[int] = set()

    def choose(self, wanted: int, first: int) -> int:
        """Returns a port; raises PortTaken.

        Args:
            wanted: the port, or the next one that was not given before; -1: none; 0: a free one.
            first: the first port to try for a free one.
        """
        if wanted < 0:
            return wanted
        if wanted:
            port = next(port for port in itertools.count(wanted) if port not in self._given)
            self._given.add(port)
            return port
        for port in range(first, min(first + _MAX_TRIES, 1 << 16)):
            if (held := _hold(port)) is not None:
                self._held.append(held)
                return port
        raise PortTaken(f"no port from {first} on is free for metrics: choose one, or -1 for none")

    def close(self) -> None:
        for each in self._held:
            each.close()
        self._held.clear()


def _hold(port: int) -> socket.socket | None:
    """Reserves a port if it is neither in use nor reserved; otherwise returns None."""
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        held.bind((HOST, port))
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            # Ignore lingering connections of an earlier run.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, port))
            listener.listen()
    except OSError:
        held.close()
        return None
    return held
