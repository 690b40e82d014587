"""Puts the scheduler's parts together and runs them: admission, the dispatcher, an engine for each worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.clock import SYSTEM, Clock
from blockyard.errors import BlockyardError
from blockyard.security.identity import InternalIdentity
from blockyard.telemetry import EventLogger
from blockyard.transport import GRPC, Transport
from scheduler_service.core.queues.backlog import Backlog
from scheduler_service.core.queues.overload import Limits
from scheduler_service.metrics import SchedulerMetrics
from scheduler_service.operations.operations import Operations
from scheduler_service.replicas.engine import Engine
from scheduler_service.replicas.fleet import PLUS, Fleet
from scheduler_service.replicas.steps.step_metrics import StepMeter
from scheduler_service.replicas.worker_link import WorkerLink
from scheduler_service.requests.admission import Admission
from scheduler_service.requests.dispatcher import Dispatcher
from scheduler_service.requests.loras import Loras
from scheduler_service.requests.registry import RequestRegistry

if TYPE_CHECKING:
    from blockyard.contract.workers import Placement
    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.core.values import SchedulerStats

log = EventLogger(__name__)


class SchedulerService:
    """All parts except the server. Ended by `close` and by cancelling `run`."""

    def __init__(
        self, configuration: SchedulerConfiguration, clock: Clock = SYSTEM, transport: Transport = GRPC
    ) -> None:
        """Reads the certificates; raises CertificateError, and SettingsError for workers that make no replica.

        `transport`: opens the channels to the workers.
        """
        self.identity = InternalIdentity(configuration.internal)
        service = configuration.service
        limits = Limits(service.max_waiting_requests, service.max_waiting_tokens, service.max_tenant_requests)
        self._configuration = configuration
        self._clock = now = clock.monotonic
        self._transport = transport
        self._started_at = now()
        self.requests = RequestRegistry(configuration.resume.resume_window_seconds, now)
        order = configuration.scheduler
        self.backlog = Backlog(order.policy, order.aging_seconds, limits)
        self.metrics = SchedulerMetrics()
        self.dispatcher = Dispatcher(self.requests, self.backlog, self.metrics, now)
        self.loras = Loras(configuration.lora, self.requests, self.dispatcher, clock)
        self.admission = Admission(configuration, self.requests, self.backlog, self.dispatcher, self.metrics, now)
        self.operations = Operations(self.dispatcher, self.requests, clock)
        self.metrics.watch(
            self.engines,
            self.backlog,
            is_ready=lambda: self.is_ready,
            num_requests=lambda: len(self.requests.live),
            num_gateways=lambda: len(self.requests.outboxes),
        )
        self._fleet = Fleet(service.worker_address, configuration.parallel, self, self._find_placement)
        self._num_replicas = 0
        self._running: dict[Engine, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    @property
    def is_ready(self) -> bool:
        return self.dispatcher.readiness.ready

    @property
    def uptime_seconds(self) -> float:
        return self._clock() - self._started_at

    @property
    def now(self) -> float:
        """The time, by the clock that all its parts use."""
        return self._clock()

    @property
    def engines(self) -> list[Engine]:
        return self.dispatcher.engines

    def stats(self) -> list[SchedulerStats]:
        """The counts of each replica that was ever set up."""
        return [engine.scheduler.stats() for engine in self.engines if engine.scheduler is not None]

    async def run(self) -> None:
        """Serves for ever. Raises the error that ended one of the parts."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self.admission.keep_time())
                tasks.create_task(self._fleet.run())
                tasks.create_task(self.loras.load_modules())
                tasks.create_task(self.loras.keep_time())
        except BaseExceptionGroup as errors:
            # A single error says more without its group.
            raise errors.exceptions[0] from None
        finally:
            for engine in self.engines:
                await engine.replica.close()

    def close(self) -> None:
        """Ends every gateway's stream with DRAINING, and begins no further epoch."""
        self.admission.close()
        for engine in self.engines:
            engine.close()
        self.requests.spans.close()

    def _make_link(self, address: str) -> WorkerLink:
        return WorkerLink(address, self.identity.peer("worker"), self._transport)

    async def _find_placement(self, address: str) -> Placement | None:
        link = self._make_link(address)
        try:
            return (await link.info()).placement
        except BlockyardError:
            return None
        finally:
            await link.close()

    # Events of the fleet.

    def on_replica_found(self, address: str) -> None:
        assert self._tasks is not None
        links = [self._make_link(each) for each in address.split(PLUS)]
        parallel = self._configuration.parallel
        # A replica may have fewer workers than the others.
        parallel = replace(parallel, tensor_parallel_size=len(links) // parallel.pipeline_parallel_size)
        engine = Engine(
            self._num_replicas,
            links,
            replace(self._configuration, parallel=parallel),
            self.dispatcher,
            self.dispatcher.suspects,
            StepMeter(self.metrics.steps),
            self._clock,
        )
        self._num_replicas += 1
        self.loras.attach(engine)
        engine.loras.on_loaded = self.metrics.on_lora_loaded
        self.dispatcher.add_engine(engine)
        self._running[engine] = self._tasks.create_task(engine.run())

    def on_workers_missing(self, message: str) -> None:
        self.dispatcher.on_workers_missing(message)

    def on_replica_gone(self, address: str) -> bool:
        """Ends a replica that is no longer listed. Returns False, and keeps it, if it serves."""
        engine = next(each for each in self.engines if each.replica.address == address)
        if engine.is_ready:
            return False
        log.info("a replica is gone", replica_id=engine.replica_id, worker_address=address)
        self.dispatcher.remove_engine(engine)
        assert self._tasks is not None
        self._tasks.create_task(self._end(engine))
        return True

    async def _end(self, engine: Engine) -> None:
        task = self._running.pop(engine)
        engine.close()
        task.cancel()
        await asyncio.wait({task})
        await engine.replica.close()
