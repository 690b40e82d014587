"""Finds workers: a list of addresses and DNS names, the names looked up again every few seconds.

Knows addresses only. Its `FleetEvents` adds a replica for each, and removes one that is no longer listed once it does
not serve.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING, Protocol

from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Iterable

log = EventLogger(__name__)

LOOKUP_SECONDS = 2.0


class FleetEvents(Protocol):
    """Learns which workers there are."""

    def on_worker_found(self, address: str) -> None:
        """A worker was found at an address."""
        ...

    def on_worker_gone(self, address: str) -> bool:
        """A worker is no longer listed. Returns False if it serves: then it is reported again."""
        ...


class Fleet:
    """Reports workers as they appear and disappear."""

    def __init__(self, targets: str, events: FleetEvents) -> None:
        """`targets`: host:port, DNS name with a port, or unix:/path, separated by commas."""
        self._targets = [target.strip() for target in targets.split(",") if target.strip()]
        self._events = events
        self._known: list[str] = []
        self._has_names = any(_is_name(target) for target in self._targets)
        self._unknown: set[str] = set()

    async def run(self) -> None:
        """Looks the targets up, for ever if there are names among them."""
        while True:
            self._compare([address for target in self._targets for address in await self._find(target)])
            if not self._has_names:
                return
            await asyncio.sleep(LOOKUP_SECONDS)

    async def _find(self, target: str) -> list[str]:
        """The addresses of a target. A name that cannot be looked up keeps those that it had."""
        if not _is_name(target):
            return [target]
        host, _, port = target.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if target not in self._unknown:
                self._unknown.add(target)
                log.warning("a name of workers cannot be looked up", target=target, error=error)
            return self._known
        self._unknown.discard(target)
        return sorted({_join(info[4][0], port) for info in found})

    def _compare(self, found: Iterable[str]) -> None:
        addresses = list(dict.fromkeys(found))
        for address in addresses:
            if address not in self._known:
                log.info("a worker was found", worker_address=address)
                self._events.on_worker_found(address)
        kept = [
            address for address in self._known if address not in addresses and not self._events.on_worker_gone(address)
        ]
        self._known = addresses + kept


def _is_name(target: str) -> bool:
    """Whether a target is to be looked up: not a socket, an address, or this machine."""
    host = target.rpartition(":")[0].strip("[]")
    if target.startswith("unix:") or host in ("", "localhost"):
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _join(host: object, port: str) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
