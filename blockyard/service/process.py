"""Runs the process of a service, answers operators' health checks and scrapes, and reports what ended it."""

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
from blockyard.security.certificate_expiry import CertificateWatch
from blockyard.security.tls import CertificateError
from blockyard.service.health import HealthServer, Heartbeat, add_health
from blockyard.service.metrics import CERTIFICATE_EXPIRY, TASKS
from blockyard.service.metrics_server import MetricsServer
from blockyard.service.roots import make_thread
from blockyard.service.servers import PortTaken
from blockyard.telemetry import EventLogger, configure_logging
from blockyard.tracing.process import TracingUnavailable, traced_process

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    import grpc.aio

    from blockyard.configuration import LogSettings, TracingSettings
    from blockyard.security.tls import CertificateFiles
    from blockyard.service.health import Probes
    from blockyard.service.metrics import Registry

log = EventLogger(__name__)

# A thread that wants the interpreter gets it this soon: an answer must not wait for another thread's turn to end.
SWITCH_SECONDS = 1e-4
# More objects than before start the garbage collector; a hundred times as many start it on all that there is, during
# which the process does nothing else: with ten thousand open streams for half a second and more. Python's own 700 had
# that happen fourteen times while they were opened, for a third of the CPU time.
YOUNG_OBJECTS = 10_000
# Time for the rest once a service has stopped: sending spans and ending threads.
TEARDOWN_SECONDS = 5.0
# Where even the log's lock is held by what hangs.
_LOG_SECONDS = 1.0


class Monitoring:
    """A process's health, metrics, heartbeat and certificates, for its operators.

    Args:
        registry: its metrics; gets those of its tasks and certificates too.
        certificates: by what each is for; None is passed over.
        is_ready: whether the service takes work.
        other_probes: further names that its health answers.

    Attributes:
        health_port, metrics_port: where it listens once it has started; 0: nowhere.
    """

    def __init__(
        self,
        registry: Registry,
        certificates: Mapping[str, CertificateFiles | None],
        is_ready: Callable[[], bool],
        other_probes: Probes = MappingProxyType({}),
    ) -> None:
        self.health_port = self.metrics_port = 0
        self._is_ready = is_ready
        self._other_probes = other_probes
        self._heartbeat = Heartbeat()
        self._certificates = CertificateWatch(certificates)
        self._metrics = MetricsServer(registry)
        self._health: HealthServer | None = None
        registry.read(TASKS, self._heartbeat.num_tasks)
        registry.read(CERTIFICATE_EXPIRY, self._certificates.expiries)

    def add_health(self, server: grpc.aio.Server) -> None:
        """Answers grpc.health.v1 on a server of the service."""
        add_health(server, self._is_ready, self._heartbeat.is_alive, self._other_probes)

    def start(self, host: str, health_port: int, metrics_port: int) -> None:
        """Listens on the two ports (0: a free one, -1: not at all) and watches the running loop; raises PortTaken."""
        if health_port >= 0:
            self._health = HealthServer(self._heartbeat.is_alive, self._is_ready, self._other_probes)
            self.health_port = self._health.start(join_address(host, health_port))
        if metrics_port >= 0:
            self.metrics_port = self._metrics.start(host, metrics_port)
        self._heartbeat.start()
        self._certificates.start()

    def stop(self) -> None:
        """Frees the ports. Without effect before `start`."""
        if self._health is not None:
            self._health.stop()
        self._metrics.stop()


class ServiceConfiguration(Protocol):
    """The sections that the configurations of all services have."""

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
    """Runs a service to its end, with the logs and traces that its configuration asks for, and returns its result.

    Soon after that the process ends, even where threads of it still work: call this last.

    Args:
        service: its name in logs and traces.
        serve: runs it until a signal.
        expected_errors: what a user can repair: one line in the log and exit status 1, as for a taken port.
        switch_seconds: after how long a thread hands the interpreter to one that waits; None: Python's own.
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
    """Takes what lives as long as the process away from the garbage collector, and has it look through the rest rarely.

    Call it once all of that is there.
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
