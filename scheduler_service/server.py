"""Starts and stops the scheduler's process: its server, its engine, its health."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from blockyard.addresses import host_of, join_address, with_port
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.clock import SYSTEM, Clock
from blockyard.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from blockyard.service.interceptors import CallCounter
from blockyard.service.process import Monitoring, run_process, tune_collector
from blockyard.service.servers import bind, make_server
from blockyard.service.signals import on_stop_signal
from blockyard.settings import SettingsError, load
from blockyard.telemetry import EventLogger
from blockyard.transport import GRPC, Transport
from scheduler_service.admin.servicer import AdminServicer
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.replicas.epoch_failure import Unusable
from scheduler_service.service import SchedulerService
from scheduler_service.servicer import SchedulerServicer

if TYPE_CHECKING:
    import grpc.aio

log = EventLogger(__name__)

ADMIN_SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
# How long the gateways' streams may take to end once they are closed.
STOP_SECONDS = 2.0


class Server:
    """The scheduler's process. `start` raises PortTaken; afterwards `address` is where it listens."""

    def __init__(
        self, configuration: SchedulerConfiguration, clock: Clock = SYSTEM, transport: Transport = GRPC
    ) -> None:
        self.address = ""
        self.error: BaseException | None = None
        self._settings = configuration.service
        self.service = SchedulerService(configuration, clock, transport)
        certificates = {"internal": self.service.identity.files}
        self.monitoring = Monitoring(self.service.metrics.registry, certificates, self._is_ready, clock=clock)
        self._server = self._make_server(transport)
        self._running: asyncio.Task[None] | None = None

    def _make_server(self, transport: Transport) -> grpc.aio.Server:
        gate = self.service.identity.gate("gateway")
        counter = CallCounter(self.service.metrics.registry.grpc_calls)
        names = [SERVICE_NAME, ADMIN_SERVICE_NAME]
        server = make_server(INTERNAL_MESSAGE_BYTES, names, gate=gate, interceptors=[counter], transport=transport)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(self.service), server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(self.service), server)
        self.monitoring.add_health(server)
        return server

    def _is_ready(self) -> bool:
        return self.service.is_ready

    async def start(self) -> None:
        """Listens, and begins to look for workers."""
        identity, address = self.service.identity, self._settings.scheduler_address
        self.address = with_port(address, bind(self._server, address, identity.credentials()))
        identity.warn_if_exposed(address)
        host, monitoring = host_of(self.address), self.monitoring
        monitoring.start(host, self._settings.scheduler_health_port, self._settings.scheduler_metrics_port)
        await self._server.start()
        self._running = asyncio.create_task(self.service.run(), name="scheduler")
        log.info(
            "listening",
            scheduler_address=self.address,
            worker_address=self._settings.worker_address,
            health_address=join_address(host, monitoring.health_port) if monitoring.health_port else None,
            metrics_address=join_address(host, monitoring.metrics_port) if monitoring.metrics_port else None,
        )

    async def run_until(self, stopping: asyncio.Event) -> None:
        """Waits for `stopping`. Raises the error if the service ends by itself, which is a bug."""
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
        self.monitoring.stop()


async def serve(configuration: SchedulerConfiguration) -> None:
    """Runs a scheduler until SIGTERM or SIGINT; a second signal ends the process at once.

    Raises PortTaken, SettingsError, and Unusable where it is not to wait for a repair.
    """
    stopping = asyncio.Event()
    on_stop_signal(stopping.set)
    server = Server(configuration)
    await server.start()
    tune_collector()
    try:
        await server.run_until(stopping)
    finally:
        log.info("stopping")
        await server.stop()


def main(arguments: list[str] | None = None) -> None:
    configuration = load(
        SchedulerConfiguration, "scheduler_service", "Decides what each step of the workers computes.", arguments
    )
    run_process("scheduler", configuration, serve, (SettingsError, Unusable))
