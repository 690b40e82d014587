"""Answers grpc.health.v1 for a service: whether its event loop runs, and whether it takes work."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent import futures
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from blockyard.channels import PUBLIC_MESSAGE_BYTES
from blockyard.service.roots import make_thread
from blockyard.service.servers import PortTaken, server_options
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    # For each service name the function that returns its health.
    Probes = Mapping[str, Callable[[], bool]]

log = EventLogger(__name__)

_NO_OTHERS: Probes = MappingProxyType({})


class Heartbeat:
    """Detects whether an event loop still runs."""

    def __init__(
        self,
        max_age_seconds: float = 5.0,
        interval_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_age_seconds = max_age_seconds
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._beat = clock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick(self._loop)

    def num_tasks(self) -> int:
        """Returns the number of unfinished tasks of the loop. May be called from any thread."""
        return len(asyncio.all_tasks(self._loop)) if self._loop else 0

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._beat = self._clock()
        loop.call_later(self._interval_seconds, self._tick, loop)

    def is_alive(self) -> bool:
        """Returns whether the last heartbeat is recent enough. May be called from any thread."""
        return self._clock() - self._beat < self._max_age_seconds


def _make_probes(is_live: Callable[[], bool], is_ready: Callable[[], bool], others: Probes) -> Probes:
    return {"": is_ready, "readiness": is_ready, "liveness": is_live, **others}


def _status(holds: bool) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
    status = health_pb2.HealthCheckResponse.ServingStatus
    return status.SERVING if holds else status.NOT_SERVING


class _ListedHealth(health.HealthServicer):
    """Adds `List` to the package's servicer, which would log a stack trace for each such call."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._listed: dict[str, health_pb2.HealthCheckResponse] = {}

    def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        super().set(service, status)
        self._listed[service] = health_pb2.HealthCheckResponse(status=status)

    def List(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthListResponse(statuses=dict(self._listed))


class HealthServer:
    """Serves grpc.health.v1 in its own thread and on its own port, so that a busy event loop cannot delay it.

    Service names: "liveness", "readiness", "" (the same as readiness), and those in `others`.
    """

    def __init__(
        self,
        is_live: Callable[[], bool],
        is_ready: Callable[[], bool],
        others: Probes = _NO_OTHERS,
        period_seconds: float = 0.25,
    ) -> None:
        self._probes = _make_probes(is_live, is_ready, others)
        self._period_seconds = period_seconds
        self._servicer = _ListedHealth(experimental_non_blocking=True)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(4, "health"), options=server_options(PUBLIC_MESSAGE_BYTES)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, self._server)
        self._stopping = threading.Event()
        self._thread = make_thread(self._watch, "health-probes")

    def start(self, address: str) -> int:
        """Listens on `host:port` and returns the port; raises PortTaken."""
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError:
            raise PortTaken(f"cannot listen on {address} for health: the port is taken") from None
        self._update()
        self._server.start()
        self._thread.start()
        return port

    def _update(self) -> None:
        for name, probe in self._probes.items():
            self._servicer.set(name, _status(self._holds(name, probe)))

    def _holds(self, name: str, probe: Callable[[], bool]) -> bool:
        try:
            return probe()
        except Exception:  # a broken probe must not leave the last answer in place
            log.exception("a health probe failed", probe=name or "readiness")
            return False

    def _watch(self) -> None:
        while not self._stopping.wait(self._period_seconds):
            self._update()

    def stop(self) -> None:
        """Stops answering and waits until the port is free. Does nothing before `start`."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._server.stop(grace=0).wait()


def add_health(
    server: grpc.aio.Server, is_ready: Callable[[], bool], is_live: Callable[[], bool], others: Probes = _NO_OTHERS
) -> None:
    """Serves grpc.health.v1 on the service's own server too, where clients look for it first."""
    health_pb2_grpc.add_HealthServicer_to_server(_LiveHealth(_make_probes(is_live, is_ready, others)), server)


class _LiveHealth(health_pb2_grpc.HealthServicer):
    def __init__(self, probes: Probes) -> None:
        self._probes = probes

    def _response(self, service: str) -> health_pb2.HealthCheckResponse | None:
        probe = self._probes.get(service)
        if probe is None:
            return None
        return health_pb2.HealthCheckResponse(status=_status(probe()))

    async def Check(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        response = self._response(request.service)
        if response is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r}")
        return response

    async def List(self, request: Any, context: Any) -> Any:  # type: ignore[override]
        return health_pb2.HealthListResponse(statuses={name: self._response(name) for name in self._probes})

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # type: ignore[override]
        last: Any = None
        with suppress(asyncio.CancelledError):
            while True:
                unknown = health_pb2.HealthCheckResponse.ServingStatus.SERVICE_UNKNOWN
                response = self._response(request.service) or health_pb2.HealthCheckResponse(status=unknown)
                if response != last:
                    yield response
                    last = response
                await asyncio.sleep(0.25)
