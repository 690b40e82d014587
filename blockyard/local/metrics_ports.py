"""Chooses the ports at which a scheduler and workers that run together answer Prometheus. Starts nothing."""

from __future__ import annotations

import socket

from blockyard.service.servers import PortTaken

HOST = "127.0.0.1"
FIRST_SCHEDULER_PORT, FIRST_WORKER_PORT = 50062, 50072
# Systems of one machine beside one another.
_MAX_TRIES = 1000


class MetricsPorts:
    """The ports of one system. Holds those that it chose until `close`.

    A port is free until its service listens, seconds later. So that no system chooses that of another one which is
    still starting, each holds its ports with UDP sockets of the same numbers, which nobody else uses.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def choose(self, wanted: int, first: int) -> int:
        """Returns the port that is wanted (-1: none), or for 0 the first free one from `first` on; raises PortTaken."""
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
    """Takes a port that nobody has or is about to have; None for any other."""
    held = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        held.bind((HOST, port))
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            # Connections of an earlier run that linger do not count.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HOST, port))
            listener.listen()
    except OSError:
        held.close()
        return None
    return held
