"""Starts and stops the worker's process: its server, its device thread, its health."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.addresses import host_of, with_port
from blockyard.channels import INTERNAL_MESSAGE_BYTES
from blockyard.clock import SYSTEM, Clock
from blockyard.contract.workers import GroupRequest, Placement, WorkerState
from blockyard.security.identity import InternalIdentity
from blockyard.service.interceptors import CallCounter
from blockyard.service.process import Monitoring, end_within, run_process
from blockyard.service.roots import end_process
from blockyard.service.servers import bind, make_server
from blockyard.service.signals import on_stop_signal
from blockyard.settings import SettingsError
from blockyard.telemetry import EventLogger
from blockyard.transport import GRPC, Transport
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from blockyard_kernels.select import KernelChoice
from worker_service.device.device import AllowedDevice
from worker_service.device.thread import DeviceThread
from worker_service.groups.joining import GroupSettings
from worker_service.groups.membership import Membership
from worker_service.operations.extensions import WorkerView, load_extensions
from worker_service.operations.operations import WorkerOperations
from worker_service.rendezvous_link import RendezvousLink
from worker_service.servicer import WorkerServicer
from worker_service.set_up import STAGES, LoaderOptions, Stages
from worker_service.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.config import WorkerConfiguration

log = EventLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
# The methods that a rank of a group calls at another rank.
RENDEZVOUS_METHODS = tuple(f"/{SERVICE_NAME}/{method}" for method in ("SetRendezvousKey", "GetRendezvousKey"))
# The method to which trainers send weights, with a ticket from the scheduler.
UPDATE_METHOD = f"/{SERVICE_NAME}/UpdateWeights"
# The time for the running work at a stop: enough for a step, but a running load is abandoned.
STOP_SECONDS = 5.0
# The time for the scheduler to close its streams: it does so within a step after it learns of the drain.
CLOSE_SECONDS = 1.0
# A delay before connections close: a peer that is still writing then loses the answers that it has not read.
LAST_WORDS_SECONDS = 0.25
# Time for answers that are ready to leave.
GRACE_SECONDS = 1.0
# All that follows on the work that runs, until the process has ended. A supervisor waits ten seconds in all.
END_SECONDS = 4.0


class Server:
    """The worker's process. `start` raises PortTaken; `address` is where it listens then."""

    def __init__(
        self,
        configuration: WorkerConfiguration,
        clock: Clock = SYSTEM,
        transport: Transport = GRPC,
        make_thread: Callable[[int], DeviceThread] = DeviceThread,
        stages: Stages = STAGES,
    ) -> None:
        """Imports the extensions; raises SettingsError for one that cannot be.

        `make_thread`: makes the device thread. `stages`: set the worker up in it.
        """
        self._settings = configuration.worker
        self._identity = InternalIdentity(configuration.internal)
        self._clock, self._transport = clock, transport
        self.address = self._settings.worker_address
        self.stopping = asyncio.Event()
        self.worker = Worker(
            allowed_device=AllowedDevice(
                self._settings.worker_device,
                self._settings.worker_device_index,
                int(self._settings.device_cache_gib * 2**30),
            ),
            num_threads=self._settings.num_threads,
            load_options=LoaderOptions(
                KernelChoice(self._settings.cpu_kernels, self._settings.gpu_kernels, self._settings.batch_invariant),
                can_sleep=self._settings.enable_sleep,
                packed_cache=Path(self._settings.packed_cache) if self._settings.packed_cache else None,
                model_code=self._settings.model_code,
            ),
            debug=self._settings.enable_debug_rpcs,
            lora_root=Path(self._settings.worker_lora_root) if self._settings.worker_lora_root else None,
            model_root=Path(self._settings.worker_model_root) if self._settings.worker_model_root else None,
            make_membership=self._make_membership,
            clock=clock,
            make_thread=make_thread,
            stages=stages,
            has_steady_loop=self._settings.steady_loop,
        )
        extensions = load_extensions(self._settings.worker_extension, WorkerView(self.worker))
        self.operations = WorkerOperations(self.worker, extensions)
        self._server = make_server(
            INTERNAL_MESSAGE_BYTES,
            [SERVICE_NAME],
            gate=self._identity.gate(
                "scheduler", {**dict.fromkeys(RENDEZVOUS_METHODS, "worker"), UPDATE_METHOD: "trainer"}
            ),
            interceptors=[CallCounter(self.worker.metrics.registry.grpc_calls)],
            transport=transport,
        )
        certificates = {"internal": self._identity.files}
        self.monitoring = Monitoring(
            self.worker.metrics.registry, certificates, self._is_ready, {"loaded": self._is_loaded}, clock
        )

    def _make_membership(self, thread: DeviceThread, incarnation: str) -> Membership:
        settings = self._settings
        group = GroupSettings(settings.collectives, settings.worker_group_host, settings.allow_insecure_group)
        return Membership(thread, incarnation, group, self._connect, clock=self._clock)

    def _connect(self, request: GroupRequest) -> RendezvousLink:
        """Opens a rank's way to its group's meeting point."""
        peer = self._identity.peer("worker")
        return RendezvousLink(request.rendezvous_address, peer, request.epoch, request.secret, self._transport)

    def _is_ready(self) -> bool:
        """Returns whether a scheduler may use the worker; a worker without a model is ready, too."""
        return not self.worker.is_draining

    def _is_loaded(self) -> bool:
        """Returns whether steps can be sent. A rolling update waits for this before it replaces the next worker."""
        return self._is_ready() and self.worker.state in (WorkerState.CACHE_READY, WorkerState.RUNNING)

    async def start(self) -> None:
        """Listens, and waits for a scheduler."""
        port = bind(self._server, self._settings.worker_address, self._identity.credentials())
        self._identity.warn_if_exposed(self._settings.worker_address)
        self.address = with_port(self.address, port)
        worker_id = f"{socket.gethostname()}/{self.address}"
        placement = Placement(
            group=self._settings.worker_group, index=self._settings.worker_index, node=socket.gethostname()
        )
        is_socket = self.address.startswith("unix:")
        save_root = Path(self._settings.worker_save_root) if self._settings.worker_save_root else None
        port = 0 if is_socket else port
        servicer = WorkerServicer(self.worker, worker_id, self._stop_soon, placement, port, self.operations, save_root)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self._server)
        self.monitoring.add_health(self._server)
        settings = self._settings
        self.monitoring.start(host_of(self.address), settings.worker_health_port, settings.worker_metrics_port)
        self.worker.start()
        await self._server.start()
        log.info(
            "listening",
            worker_address=self.address,
            health_port=self.monitoring.health_port or None,
            metrics_port=self.monitoring.metrics_port or None,
        )

    def _stop_soon(self) -> None:
        """Stops once the answer to Shutdown was read."""
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.stopping.set)

    async def stop(self) -> bool:
        """Finishes the running step, reports it, waits for the scheduler to close its stream, and closes everything.

        Returns whether the device thread has ended: work that takes too long is abandoned, but continues to run.
        """
        log.info("stopping")
        is_idle = await self.worker.drain(STOP_SECONDS)
        if not is_idle:
            log.warning("gave up waiting for running work", after_seconds=STOP_SECONDS)
        if await self.worker.end_streams(CLOSE_SECONDS):
            await asyncio.sleep(LAST_WORDS_SECONDS)
        await self._server.stop(GRACE_SECONDS)
        self.monitoring.stop()
        return is_idle and await self.worker.stop(GRACE_SECONDS)


async def serve(configuration: WorkerConfiguration) -> bool:
    """Runs until SIGTERM, SIGINT or the Shutdown rpc, and returns whether the device thread has ended.

    From then on the process has STOP_SECONDS and END_SECONDS. A second signal ends it at once.
    """
    server = Server(configuration)
    on_stop_signal(server.stopping.set)
    await server.start()
    await server.stopping.wait()
    end_within(STOP_SECONDS + END_SECONDS)
    return await server.stop()


def run(configuration: WorkerConfiguration) -> None:
    has_ended = run_process("worker", configuration, serve, (SettingsError,))
    if not has_ended:
        # The interpreter's own end takes torch away under the thread that computes, which aborts the process.
        end_process(0)
