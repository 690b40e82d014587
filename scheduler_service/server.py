"""Starts and stops the scheduler's process: its server, its engine, its health."""

from __future__ import annotations

import asyncio
import gc
import sys
from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.security.certificate_expiry import CertificateWatch
from blockyard.security.tls import CertificateError
from blockyard.service.call_metrics import CallCounter
from blockyard.service.metrics import CERTIFICATE_EXPIRY, TASKS
from blockyard.service.metrics_server import MetricsServer
from blockyard.service.servers import (
    INTERNAL_MESSAGE_BYTES,
    HealthServer,
    Heartbeat,
    PortTaken,
    add_health,
    bind,
    make_server,
)
from blockyard.service.signals import on_stop_signal
from blockyard.settings import load
from blockyard.telemetry import EventLogger, configure_logging
from blockyard.tracing.process import TracingUnavailable, traced_process
from scheduler_service.admin.servicer import AdminServicer
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.replicas.replica import Unusable
from scheduler_service.service import SchedulerService
from scheduler_service.servicer import SchedulerServicer

if TYPE_CHECKING:
    import grpc.aio

log = EventLogger(__name__)

ADMIN_SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
# Time for the gateways' streams to end by themselves once they are told to.
STOP_SECONDS = 2.0
# A thread that wants the interpreter gets it soon: gRPC's own threads wake the loop.
SWITCH_SECONDS = 1e-4


class Server:
    """The scheduler's process. `start` raises PortTaken; `address` is where it listens then."""

    def __init__(self, configuration: SchedulerConfiguration) -> None:
        self.address = ""
        self.health_address = ""
        self.metrics_address = ""
        self.error: BaseException | None = None
        self._settings = configuration.service
        self.service = SchedulerService(configuration)
        self._heartbeat = Heartbeat()
        self._server = self._make_server()
        self._health: HealthServer | None = None
        self._metrics = MetricsServer(self.service.metrics.registry)
        self.service.metrics.registry.read(TASKS, self._heartbeat.num_tasks)
        self._certificates = CertificateWatch({"internal": self.service.identity.files})
        self.service.metrics.registry.read(CERTIFICATE_EXPIRY, self._certificates.expiries)
        self._running: asyncio.Task[None] | None = None

    def _make_server(self) -> grpc.aio.Server:
        gate = self.service.identity.gate("gateway")
        counter = CallCounter(self.service.metrics.registry.grpc_calls)
        names = [SERVICE_NAME, ADMIN_SERVICE_NAME]
        server = make_server(INTERNAL_MESSAGE_BYTES, names, gate=gate, interceptors=[counter])
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(self.service), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.service), server)
        add_health(server, self._is_ready, self._heartbeat.is_alive)
        return server

    def _is_ready(self) -> bool:
        return self.service.is_ready

    async def start(self) -> None:
        """Listens, and begins to look for workers."""
        identity, address = self.service.identity, self._settings.scheduler_address
        self.address = _with_port(address, bind(self._server, address, identity.credentials()))
        identity.warn_if_exposed(address)
        host = "127.0.0.1" if self.address.startswith("unix:") else self.address.rpartition(":")[0]
        if self._settings.scheduler_health_port >= 0:
            self._health = HealthServer(self._heartbeat.is_alive, self._is_ready)
            self.health_address = f"{host}:{self._health.start(f'{host}:{self._settings.scheduler_health_port}')}"
        if self._settings.scheduler_metrics_port >= 0:
            self.metrics_address = f"{host}:{self._metrics.start(host, self._settings.scheduler_metrics_port)}"
        self._heartbeat.start()
        self._certificates.start()
        await self._server.start()
        self._running = asyncio.create_task(self.service.run(), name="scheduler")
        log.info(
            "listening",
            scheduler_address=self.address,
            worker_address=self._settings.worker_address,
            health_address=self.health_address or None,
            metrics_address=self.metrics_address or None,
        )

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Waits for `stopping`. Raises what ended the service, if it ends by itself: a bug."""
        assert self._running is not None
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait({waiting, self._running}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._running.done():
            self._running.result()

    async def stop(self) -> None:
        """Ends all streams with DRAINING, and closes everything. The workers go on: a successor takes them over."""
        self.service.close()
        await self._server.stop(STOP_SECONDS)
        if self._running:
            self._running.cancel()
            await asyncio.wait({self._running})
            self.error = None if self._running.cancelled() else self._running.exception()
        if self._health:
            self._health.stop()
        self._metrics.stop()


def _with_port(address: str, port: int) -> str:
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


async def serve(configuration: SchedulerConfiguration) -> None:
    """Runs a scheduler until SIGTERM or SIGINT; a second signal ends the process at once.

    Raises PortTaken, and Unusable where it is not to wait for a repair.
    """
    stopping = asyncio.Event()
    on_stop_signal(stopping.set)
    server = Server(configuration)
    await server.start()
    gc.collect()
    gc.freeze()
    try:
        await server.run_until(stopping)
    finally:
        log.info("stopping")
        await server.stop()


def main(arguments: list[str] | None = None) -> None:
    """The program: `python -m scheduler_service`."""
    configuration = load(
        SchedulerConfiguration, "scheduler_service", "Decides what each step of the workers computes.", arguments
    )
    configure_logging("scheduler", level=configuration.log.log_level, log_format=configuration.log.log_format)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        with traced_process("scheduler", configuration.tracing):
            asyncio.run(serve(configuration))
    except (PortTaken, CertificateError, Unusable, TracingUnavailable) as error:
        log.error(str(error))
        sys.exit(1)
