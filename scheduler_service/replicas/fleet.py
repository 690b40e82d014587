"""Finds the workers of replicas: a list of addresses and DNS names, the names looked up again every few seconds.

A replica of several workers is named by their addresses, joined by plus signs, in the order of their ranks. Workers
found by DNS names report which group they belong to. Knows addresses only. Its `FleetEvents` adds each replica, and
removes one that is no longer listed once it stops serving.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import defaultdict
from typing import TYPE_CHECKING, Protocol

from blockyard.settings import SettingsError
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from blockyard.configuration import ParallelSettings
    from blockyard.contract.workers import Placement

log = EventLogger(__name__)

LOOKUP_SECONDS = 2.0
# Separates the addresses of one replica's workers.
PLUS = "+"
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


class FleetEvents(Protocol):
    def on_replica_found(self, address: str) -> None:
        """The workers of a replica were found; their addresses are joined by plus signs."""

    def on_replica_gone(self, address: str) -> bool:
        """A replica is no longer listed. Returns False if it serves: then it is reported again."""
        ...

    def on_workers_missing(self, message: str) -> None:
        """Some workers do not make a whole replica; an empty message: all do."""


class Fleet:
    """Reports replicas as they appear and disappear."""

    def __init__(
        self,
        targets: str,
        parallel: ParallelSettings,
        events: FleetEvents,
        find_placement: Callable[[str], Awaitable[Placement | None]],
    ) -> None:
        """Raises SettingsError for a replica that has more workers than `parallel` says, or where none has all.

        `targets`: host:port, DNS name with a port, or unix:/path, separated by commas, those of one replica by plus
        signs. `find_placement`: asks a worker where it belongs; None: it does not answer.
        """
        self._targets = [target.strip() for target in targets.split(",") if target.strip()]
        self._world_size = parallel.world_size
        self._events = events
        self._find_placement = find_placement
        self._known: list[str] = []
        self._has_names = any(_is_name(target) for target in self._targets)
        self._unknown: set[str] = set()
        # Placements of the workers that were found by name, by address.
        self._placements: dict[str, Placement] = {}
        self._missing = ""
        self._check_sizes(may_be_smaller=parallel.pipeline_parallel_size == 1)

    def _check_sizes(self, *, may_be_smaller: bool) -> None:
        """Checks that replicas have the configured size. If one has, others may be smaller."""
        sizes = {target: target.count(PLUS) + 1 for target in self._targets if not _is_name(target)}
        legal = {self._world_size}
        if may_be_smaller and (self._world_size in sizes.values() or self._has_names):
            legal |= {size for size in TENSOR_PARALLEL_SIZES if size < self._world_size}
        for target, num_workers in sizes.items():
            if num_workers not in legal:
                raise SettingsError(
                    f"--worker-address: {target} names {num_workers} of the {self._world_size} workers of a replica"
                    " (see --tensor-parallel-size and --pipeline-parallel-size);"
                    " plus signs join the workers of one replica, commas separate replicas"
                )

    async def run(self) -> None:
        """Looks the targets up, for ever if there are names among them."""
        while True:
            problems: list[str] = []
            self._compare(await self._find(problems))
            if (missing := "; ".join(problems)) != self._missing:
                self._missing = missing
                if missing:
                    log.warning("the workers do not make a whole replica", reason=missing)
                self._events.on_workers_missing(missing)
            if not self._has_names:
                return
            await asyncio.sleep(LOOKUP_SECONDS)

    async def _find(self, problems: list[str]) -> list[str]:
        """Finds the replicas of all targets; adds what they lack to `problems`."""
        replicas = [target for target in self._targets if not _is_name(target)]
        found = [await self._look_up(target) for target in self._targets if _is_name(target)]
        if None in found:
            # If a name cannot be looked up, its replicas are kept.
            replicas += self._known
        addresses = sorted({address for each in found if each for address in each})
        # A replica may have workers at several ports of one machine, and so of several names.
        return replicas + (addresses if self._world_size == 1 else await self._group(addresses, problems))

    async def _look_up(self, target: str) -> list[str] | None:
        host, _, port = target.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if target not in self._unknown:
                self._unknown.add(target)
                log.warning("a worker address cannot be looked up", target=target, error=error)
            return None
        self._unknown.discard(target)
        return [_join(info[4][0], port) for info in found]

    async def _group(self, addresses: list[str], problems: list[str]) -> list[str]:
        self._placements = {address: self._placements[address] for address in addresses if address in self._placements}
        unknown = [address for address in addresses if address not in self._placements]
        placements = await asyncio.gather(*map(self._find_placement, unknown))
        for address, placement in zip(unknown, placements, strict=True):
            if placement is None:
                problems.append(f"no worker answers at {address}")
            elif not placement.group:
                problems.append(f"the worker at {address} was started without --worker-group")
            else:
                self._placements[address] = placement
        replicas, incomplete = make_groups(self._placements, self._world_size)
        problems += incomplete
        return replicas

    def _compare(self, found: Iterable[str]) -> None:
        replicas = list(dict.fromkeys(found))
        for replica in replicas:
            if replica not in self._known:
                log.info("a replica was found", worker_address=replica)
                self._events.on_replica_found(replica)
        kept = [
            replica for replica in self._known if replica not in replicas and not self._events.on_replica_gone(replica)
        ]
        self._known = replicas + kept


def make_groups(placements: Mapping[str, Placement], world_size: int) -> tuple[list[str], list[str]]:
    """Groups workers into replicas; returns them, and a message for each incomplete one.

    Indices of a group go on from one replica to the next, so that the ordinals of a StatefulSet need no arithmetic.
    """
    groups: defaultdict[tuple[str, int], list[tuple[int, str]]] = defaultdict(list)
    for address, placement in placements.items():
        groups[placement.group, placement.index // world_size].append((placement.index, address))
    replicas: list[str] = []
    incomplete: list[str] = []
    for (name, number), members in sorted(groups.items()):
        members.sort()
        indices = [index for index, _ in members]
        wanted = range(number * world_size, (number + 1) * world_size)
        if indices == list(wanted):
            replicas.append(PLUS.join(address for _, address in members))
        else:
            there = ", ".join(map(str, indices))
            incomplete.append(
                f"group {name} has workers of index {there} where a replica has {wanted[0]} to {wanted[-1]}"
            )
    return replicas, incomplete


def _is_name(target: str) -> bool:
    """Whether a target is a DNS name: not a socket, an IP address, this machine, or several workers."""
    host = target.rpartition(":")[0].strip("[]")
    if target.startswith("unix:") or host in ("", "localhost") or PLUS in target:
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _join(host: object, port: str) -> str:
    return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
