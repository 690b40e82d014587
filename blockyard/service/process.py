"""Runs a service's process: logging, tracing, health, metrics, and the exit status."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from blockyard.addresses import join_address
from blockyard.clock import SYSTEM, Clock
from blockyard.security.certificate_expiry import CertificateWatch
from blockyard.security.tls import CertificateError, CertificateFiles
from blockyard.service.health import HealthServer, Heartbeat, add_health
from blockyard.service.metrics import CERTIFICATE_EXPIRY, TASKS, Registry
from blockyard.service.metrics_server import MetricsServer
from blockyard.service.roots import make_thread
from blockyard.service.servers import PortTaken
from blockyard.telemetry import EventLogger, configure_logging
from blockyard.tracing.process import TracingUnavailable, traced_process

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    import grpc.aio

    from blockyard.configuration import LogSettings, TracingSettings
    from blockyard.service.health import Probes

log = EventLogger(__name__)

# The interpreter's switch interval: a thread with an answer must not wait long for another thread's turn.
SWITCH_SECONDS = 1e-4
# The garbage collector's threshold for new objects; a full collection runs after a hundred times as many, and stops the
# process: with ten thousand open streams for half a second or more. With Python's default of 700 that happened fourteen
# times while the streams were opened, and took a third of the CPU time.
YOUNG_OBJECTS = 10_000
# Time to send spans and end threads once a service has stopped.
TEARDOWN_SECONDS = 5.0
# Where even the log's lock is held by what hangs.
_LOG_SECONDS = 1.0


class Monitoring:
    """A process's health, metrics, heartbeat and certificates, for its operators.

    Args:
        registry: the process's metrics; the ones of tasks and certificates are added.
        certificates: certificate files by purpose; None values are skipped.
        is_ready: whether the service takes work.
        other_probes: further health service names.
        clock: times the heartbeat and the certificates.

    Attributes:
        health_port, metrics_port: the ports in use after `start`; 0: not listening.
    """

    def __init__(
        self,
        registry: Registry,
        certificates: Mapping[str, CertificateFiles | None],
        is_ready: Callable[[], bool],
        other_probes: Probes = MappingProxyType({}),
        clock: Clock = SYSTEM,
    ) -> None:
        self.health_port = self.metrics_port = 0
        self._is_ready = is_ready
        self._other_probes = other_probes
        self._heartbeat = Heartbeat(clock=clock.monotonic)
        self._certificates = CertificateWatch(certificates, clock.time)
        self._metrics = MetricsServer(registry)
        self._health: HealthServer | None = None
        registry.read(TASKS, self._heartbeat.num_tasks)
        registry.read(CERTIFICATE_EXPIRY, self._certificates.expiries)

    def add_health(self, server: grpc.aio.Server) -> None:
        """Serves grpc.health.v1 on the service's own server."""
        add_health(server, self._is_ready, self._heartbeat.is_alive, self._other_probes)

    def start(self, host: str, health_port: int, metrics_port: int) -> None:
        """Listens on the ports (0: a free one, -1: none) and starts heartbeat and checks; raises PortTaken."""
        if health_port >= 0:
            self._health = HealthServer(self._heartbeat.is_alive, self._is_ready, self._other_probes)
            self.health_port = self._health.start(join_address(host, health_port))
        if metrics_port >= 0:
            self.metrics_port = self._metrics.start(host, metrics_port)
        self._heartbeat.start()
        self._certificates.start()

    def stop(self) -> None:
        """Frees the ports. Does nothing before `start`."""
        if self._health is not None:
            self._health.stop()
        self._metrics.stop()


class ServiceConfiguration(Protocol):
    """The sections that every service's configuration has."""

    @property
    def log(self) -> LogSettings: ...

    @property
    def tracing(self) -> TracingSettings: ...


Configuration = TypeVar("Configuration", bound=ServiceConfiguration)
Result = TypeVar("Result")


def run_process(
    service: str,
    configuration: Configuration,
    serve: Callable[[Configuration], Coroutine[Any, Any, Result]],
    expected_errors: tuple[type[Exception], ...] = (),
    *,
    switch_seconds: float | None = SWITCH_SECONDS,
) -> Result:
    """Runs a service to its end, with logging and tracing as configured, and returns its result.

    The process ends TEARDOWN_SECONDS later even if threads still run: call this last.

    Args:
        service: the service's name in logs and traces.
        serve: runs the service until a signal.
        expected_errors: errors that users can fix: logged in one line, with exit status 1, like a taken port.
        switch_seconds: the interpreter's thread switch interval; None: Python's default.
    """
    configure_logging(service, level=configuration.log.log_level, log_format=configuration.log.log_format)
    if switch_seconds is not None:
        sys.setswitchinterval(switch_seconds)
    try:
        with traced_process(service, configuration.tracing):
            return asyncio.run(_serve(serve(configuration)))
    except (PortTaken, CertificateError, TracingUnavailable, *expected_errors) as error:
        log.error(str(error))
        sys.exit(1)


async def _serve(service: Coroutine[Any, Any, Result]) -> Result:
    exit_code = 1
    try:
        result = await service
        exit_code = 0
        return result
    finally:
        end_within(TEARDOWN_SECONDS, exit_code)


def tune_collector() -> None:
    """Excludes all present objects from garbage collection, and makes collections rarer.

    Call it once all long-lived objects exist.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def raise_file_limit() -> int:
    """Raises this process's limit to what it may be raised to, and returns it.

    What a shell or a supervisor gives, often 1024, is for programs that cannot have more; a server's connections can.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems say that there is no limit, and have one.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def end_within(seconds: float, exit_code: int = 0) -> None:
    """Ends this process after so long, whatever its threads do; without effect where it has ended by itself.

    A thread that computes, or reads a file system that hangs, cannot be interrupted, and Python's own end waits for it:
    asyncio's for five minutes, the interpreter for ever.
    """
    make_thread(partial(_end, seconds, exit_code), "end").start()


def _end(seconds: float, exit_code: int) -> None:
    time.sleep(seconds)
    teller = threading.Thread(target=_tell, args=(seconds,), daemon=True)
    teller.start()
    teller.join(_LOG_SECONDS)
    os._exit(exit_code)


def _tell(seconds: float) -> None:
    log.warning("the process ends without threads that still work", after_seconds=seconds)
