"""A clock and a transport to give to a service, and a search for parts of it that have the system's instead."""

from __future__ import annotations

import asyncio
import gc
import time
from random import Random, SystemRandom
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import grpc.aio

from blockyard.clock import SYSTEM, Clock
from blockyard.transport import GrpcTransport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Of all objects of a process, or not held but run.
_NO_PARTS = (asyncio.AbstractEventLoop, BuiltinFunctionType, CodeType, FrameType, ModuleType, type)
_SYSTEMS = {id(each) for each in (SYSTEM, time.monotonic, time.perf_counter, time.time)}


class NotedTransport(GrpcTransport):
    """gRPC, which notes the servers and channels that it makes."""

    def __init__(self) -> None:
        self.servers: list[grpc.aio.Server] = []
        self.channels: list[grpc.aio.Channel] = []

    def server(self, *arguments: Any) -> grpc.aio.Server:
        self.servers.append(super().server(*arguments))
        return self.servers[-1]

    def channel(self, *arguments: Any) -> grpc.aio.Channel:
        self.channels.append(super().channel(*arguments))
        return self.channels[-1]


def make_clock(seed: int = 1) -> Clock:
    """Makes a clock that is not the system's, for services in the running loop."""
    now = asyncio.get_running_loop().time
    return Clock(now, now, lambda: 1_700_000_000.0, Random(seed))


def find_strays(service: object, transport: NotedTransport) -> list[str]:
    """Finds the system's clocks, and what another transport has made, in a service: how each is reached."""
    made = {id(each) for each in (*transport.servers, *transport.channels)}

    def is_stray(held: object) -> bool:
        is_of_grpc = isinstance(held, grpc.aio.Channel | grpc.aio.Server)
        return id(held) in _SYSTEMS or isinstance(held, SystemRandom) or (is_of_grpc and id(held) not in made)

    return [f"{way}: {held!r}" for held, way in _walk(service) if is_stray(held)]


def _walk(root: object) -> Iterator[tuple[object, str]]:
    """Yields what an object holds, in attributes, containers and closures, and the types on the way to each.

    Defaults of functions are not held: whoever calls may give something else.
    """
    seen = {id(root): root}
    waiting: list[tuple[Any, str]] = [(root, type(root).__name__)]
    while waiting:
        held, way = waiting.pop()
        yield held, way
        for part in _parts_of(held):
            if id(part) not in seen:
                seen[id(part)] = part
                waiting.append((part, f"{way} > {getattr(part, '__qualname__', type(part).__name__)}"))


def _parts_of(held: Any) -> Iterable[Any]:
    if isinstance(held, _NO_PARTS) or type(held).__module__.startswith("grpc._cython"):
        return ()
    if isinstance(held, FunctionType):
        return held.__closure__ or ()
    if isinstance(held, MethodType):
        return (held.__self__, held.__func__)
    return gc.get_referents(held)
