"""One connection of a fault proxy: bytes from socket to socket, late, frozen, or up to a chosen byte.

Knows nothing of what the bytes say, and nothing of other connections but the network that it shares with them.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 64 * 1024


class Direction(StrEnum):
    """Which way bytes go."""

    UP = "up"
    """From who connects to who listens."""
    DOWN = "down"
    """The other way."""


class Ending(StrEnum):
    """How a connection ends."""

    CUT = "cut"
    """As when a process ends: FIN to both."""
    RESET = "reset"
    """As when a machine does not know it any more: RST to both (Unix sockets have none, and get an end of file)."""


@dataclass(frozen=True, slots=True)
class EndAt:
    """Ends a connection when `num_bytes` have gone in `direction`; exactly so many arrive."""

    direction: Direction
    num_bytes: int
    ending: Ending = Ending.CUT


@dataclass(frozen=True, slots=True)
class Rule:
    """What happens to a connection: each piece of data is held for a time, and it may end at a byte."""

    delay_seconds: float = 0.0
    end_at: EndAt | None = None


@dataclass(slots=True)
class Stats:
    """Counted since the proxy's start."""

    num_connections: int = 0
    num_refused: int = 0
    num_endings: dict[Ending, int] = field(default_factory=lambda: dict.fromkeys(Ending, 0))
    num_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(Direction, 0))

    def __str__(self) -> str:
        counts = {
            "connections": self.num_connections,
            "refused": self.num_refused,
            **{str(ending): count for ending, count in self.num_endings.items()},
            **{f"bytes_{direction}": count for direction, count in self.num_bytes.items()},
        }
        return " ".join(f"{name}={count}" for name, count in counts.items())


def random_rules(
    seed: int, max_up_bytes: int, max_down_bytes: int, delay_seconds: float = 0.0
) -> Callable[[int], Rule]:
    """Makes the end of connection i, a function of (seed, i): either way and kind, before so many bytes."""
    max_bytes = {Direction.UP: max_up_bytes, Direction.DOWN: max_down_bytes}

    def rule_of(number: int) -> Rule:
        draw = random.Random(f"{seed}/{number}")
        direction = draw.choice(list(Direction))
        return Rule(delay_seconds, EndAt(direction, draw.randrange(max_bytes[direction]), draw.choice(list(Ending))))

    return rule_of


class Connection:
    """One connection through the proxy: two sockets and a task for each way."""

    def __init__(self, number: int, client: socket.socket, rule: Rule, whole: asyncio.Event, stats: Stats) -> None:
        self.number = number
        self.rule = rule
        self._client = client
        self._sockets = [client]
        self._stats = stats
        self._passed = dict.fromkeys(Direction, 0)
        self._network_is_whole = whole
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._ended = asyncio.Event()

    def freeze(self) -> None:
        """Takes nothing and closes nothing, like a host that hangs."""
        self._thawed.clear()

    def thaw(self) -> None:
        """Goes on where it was frozen."""
        self._thawed.set()

    def end(self, ending: Ending) -> None:
        """Ends it now."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._stats.num_endings[ending] += 1
        for end in self._sockets:
            # Its peer may have gone first.
            with suppress(OSError):
                if ending is Ending.CUT:
                    end.shutdown(socket.SHUT_RDWR)
                elif end.family != socket.AF_UNIX:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def close(self) -> None:
        """Closes both sockets, whether it has run or not."""
        for end in self._sockets:
            end.close()

    async def run(self, target: str) -> None:
        """Connects to the target and moves bytes until both ways are at their end, or it is ended."""
        moving = asyncio.create_task(self._move_all(target))
        ended = asyncio.create_task(self._ended.wait())
        try:
            await asyncio.wait({moving, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            moving.cancel()
            ended.cancel()
            await asyncio.wait({moving, ended})
            self.close()
        if not moving.cancelled():
            moving.result()

    async def _move_all(self, target: str) -> None:
        """An end of file one way leaves the other way open, as it was; a peer that is lost is lost to the other too."""
        try:
            server = await self._connect(target)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._move(self._client, server, Direction.UP))
                group.create_task(self._move(server, self._client, Direction.DOWN))
        except* OSError:
            pass

    async def _connect(self, target: str) -> socket.socket:
        await self._wait_until_whole()
        family, address = parse_address(target)
        server = socket.socket(family)
        self._sockets.append(server)
        server.setblocking(False)
        await asyncio.get_running_loop().sock_connect(server, address)
        return server

    async def _wait_until_whole(self) -> None:
        while not (self._thawed.is_set() and self._network_is_whole.is_set()):
            await self._thawed.wait()
            await self._network_is_whole.wait()

    async def _move(self, source: socket.socket, destination: socket.socket, direction: Direction) -> None:
        loop = asyncio.get_running_loop()
        while not self._is_due(direction):
            await self._wait_until_whole()
            data = await loop.sock_recv(source, CHUNK_BYTES)
            await asyncio.sleep(self.rule.delay_seconds)
            # It may have been frozen while it waited for data.
            await self._wait_until_whole()
            if not data:
                with suppress(OSError):
                    destination.shutdown(socket.SHUT_WR)
                return
            data = data[: self._num_left(direction)]
            await loop.sock_sendall(destination, data)
            self._passed[direction] += len(data)
            self._stats.num_bytes[direction] += len(data)
        assert self.rule.end_at is not None
        self.end(self.rule.end_at.ending)

    def _num_left(self, direction: Direction) -> int | None:
        """Bytes that may still go this way; None: as many as come."""
        end_at = self.rule.end_at
        if end_at is None or end_at.direction is not direction:
            return None
        return max(0, end_at.num_bytes - self._passed[direction])

    def _is_due(self, direction: Direction) -> bool:
        return self._num_left(direction) == 0


def parse_address(address: str) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    """Reads `host:port` or `unix:/path` into what a socket takes."""
    if address.startswith("unix:"):
        return socket.AF_UNIX, address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    return socket.AF_INET, (host, int(port))
