"""Chooses the metrics ports of a scheduler and workers that run together. Starts no server."""

from __future__ import annotations

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

    def choose(self, wanted: int, first: int) -> int:
        """Returns `wanted` (-1: none), or for 0 the first free port from `first` on; raises PortTaken."""
        if wanted:
            return wanted
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
