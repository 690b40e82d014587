"""One worker of a replica: its connection, its last known state, and each call that sets it up.

Knows neither the other ranks nor the order of the calls. Every failure leaves here as NotReady.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

from blockyard.capacity.adapters import lora_limits
from blockyard.contract.models import parse_task
from blockyard.contract.workers import (
    AvailableBlocks,
    CacheInfo,
    CachePlan,
    DeviceRequest,
    DeviceType,
    Dtype,
    GroupInfo,
    LoadedModel,
    LoadFormat,
    LoadProgress,
    LoadRequest,
    ProfileRequest,
    Quantization,
    WeightsSource,
    WorkerInfo,
    WorkerState,
)
from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from scheduler_service.config import SchedulerConfiguration, model_source
from scheduler_service.replicas.epoch_failure import LAST_FAILURE_RETRY_SECONDS, NotReady, Unreachable
from scheduler_service.replicas.facts import MeetingPoint, StartPhase, StartProgress
from scheduler_service.replicas.start_spans import StartSpans
from scheduler_service.replicas.steps.answer_checks import WrongAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from blockyard.contract.parallel import Parallel
    from scheduler_service.replicas.worker_link import WorkerLink

log = EventLogger(__name__)

API_VERSION = "v1"
PROGRESS_SECONDS = 2.0
# Errors that pass by themselves. A rank reports them if another rank is gone or, while a group is formed, was restarted
# or hangs.
_TRANSIENT = (Reason.GROUP_BROKEN, Reason.DRAINING)
_TRANSIENT_OF_GROUPS = (*_TRANSIENT, Reason.WRONG_STATE, Reason.GENERATION_DEADLINE)


def configuration_digest(configuration: SchedulerConfiguration, parallel: Parallel) -> str:
    """Hashes all settings that a worker gets: a worker with this digest can be taken over as it is."""
    device, cache, step = configuration.device, configuration.cache, configuration.scheduler
    settings: list[tuple[object, ...]] = [
        (API_VERSION, model_source(configuration.model), configuration.model.revision),
        (device.device, device.dtype, device.quantization, device.device_memory_utilization, device.swap_space_gib),
        (configuration.load.load_format, configuration.load.task),
        (cache.block_size, cache.num_device_blocks, cache.num_host_blocks),
        (step.max_model_len, step.max_num_seqs, step.max_num_batched_tokens),
        (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.rank),
        astuple(lora_limits(configuration.lora)),
    ]
    if any(drafts := configuration.speculation.find_limits(parallel)):
        settings.append(drafts)
    if cache.kv_cache_dtype != "auto":
        settings.append((cache.kv_cache_dtype,))
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


_UNFIT = {
    WorkerState.UNSPECIFIED: "is in a state that this scheduler does not know",
    WorkerState.SLEEPING: "is asleep",
    WorkerState.STALE: "has stale weights: load them anew (blockyard admin wake --reload)",
}


class Rank:
    """A worker at its place in a replica. `on_progress` is called every few seconds while it loads."""

    def __init__(
        self,
        link: WorkerLink,
        parallel: Parallel,
        configuration: SchedulerConfiguration,
        on_progress: Callable[[], None],
    ) -> None:
        self.link = link
        self.parallel = parallel
        # What the worker said when it last answered; None: it did not answer.
        self.worker: WorkerInfo | None = None
        # The loaded part of the model, from 0 to 1.
        self.loaded_share = 0.0
        # The phase of the set-up; None: the worker is not being set up.
        self.start: StartProgress | None = None
        self._configuration = configuration
        self._digest = configuration_digest(configuration, parallel)
        self._on_progress = on_progress
        self._spans = StartSpans()
        # Goes on when the set-up of another rank fails meanwhile.
        self._loading: asyncio.Task[LoadedModel] | None = None
        # The incarnation that was asked to end.
        self._dismissed = ""
        self._who = (
            "the worker" if parallel.world_size == 1 else f"the worker of rank {parallel.rank} at {link.address}"
        )

    @property
    def address(self) -> str:
        return self.link.address

    @property
    def state(self) -> WorkerState:
        """The worker's state when it last answered."""
        return self.worker.state if self.worker else WorkerState.UNREACHABLE

    @property
    def incarnation(self) -> str:
        """The id of the worker process; empty if none answered."""
        return self.worker.incarnation if self.worker else ""

    @property
    def _known(self) -> WorkerInfo:
        assert self.worker is not None
        return self.worker

    @property
    def model(self) -> LoadedModel | None:
        return self._known.model

    @property
    def cache(self) -> CacheInfo | None:
        return self._known.cache

    @property
    def group(self) -> GroupInfo | None:
        return self._known.group

    @property
    def last_epoch(self) -> int:
        """The highest epoch that the worker has seen, of steps or of a group."""
        return max(self._known.epoch, self.group.epoch if self.group else 0)

    def note(self, **changes: object) -> None:
        """Changes the last known state, until the worker is asked again."""
        if self.worker:
            self.worker = replace(self.worker, **changes)  # type: ignore[arg-type]

    async def look(self) -> None:
        """Updates the last known state. Changes nothing at the worker."""
        try:
            self.worker = await self.link.info()
        except BlockyardError:
            self.worker = None

    @contextmanager
    def _explained(self, transient: tuple[Reason, ...] = _TRANSIENT) -> Generator[None]:
        """Translates a call's errors to NotReady; those with `transient` reasons are soon tried again."""
        try:
            yield
        except BlockyardError as error:
            if error.reason is Reason.NO_READY_WORKER:
                self.worker = None
                raise Unreachable(f"no worker answers at {self.address}") from error
            message = f"the worker at {self.address}: {error.message}"
            if error.reason in transient:
                raise NotReady(message) from error
            needs_repair = not isinstance(error, WrongAnswer)
            raise NotReady(message, LAST_FAILURE_RETRY_SECONDS, needs_repair=needs_repair) from error

    async def ask(self) -> None:
        """Asks the worker who it is and how far it is set up."""
        with self._explained():
            self.worker = await self.link.info()

    async def check(self, may_claim: Callable[[str], bool]) -> None:
        """Raises NotReady if the worker cannot serve this replica."""
        worker = self._known
        if worker.api_version != API_VERSION:
            raise NotReady(f"{self._who} speaks api version {worker.api_version!r}, not {API_VERSION!r}")
        if worker.draining:
            raise NotReady(f"{self._who} is stopping; waiting for its successor")
        if not may_claim(worker.incarnation):
            raise NotReady(
                f"{self._who} belongs to another replica, by another address: give each worker once (--worker-address)"
            )
        if worker.state in _UNFIT:
            raise NotReady(f"{self._who} {_UNFIT[worker.state]}")
        if worker.state is not WorkerState.CREATED and worker.configuration_digest != self._digest:
            await self.dismiss("another configuration")

    async def dismiss(self, what: str) -> None:
        """Ends a worker process that was set up differently. Always raises NotReady."""
        worker = self._known
        if worker.incarnation != self._dismissed:
            log.info(f"ending a worker of {what}", worker_address=self.address, incarnation=worker.incarnation)
            with self._explained():
                await self.link.shutdown(what)
            self._dismissed = worker.incarnation
        raise NotReady(f"{self._who} had {what} and was told to end; waiting for its successor")

    def begin_set_up(self) -> AbstractContextManager[object]:
        """Begins the trace of an attempt to set the worker up, and returns its context."""
        self._spans = StartSpans(worker_address=self.address, incarnation=self.incarnation)
        return self._spans.all()

    @contextmanager
    def _phase(self, phase: StartPhase) -> Generator[None]:
        """Sets `start` to a phase while a call of the set-up runs."""
        self.start = StartProgress(phase)
        try:
            yield
        finally:
            self.start = None

    # Loading.

    async def load(self) -> LoadedModel:
        """Loads the model unless the worker has one. If cancelled, the worker goes on; the next call waits."""
        if self._loading is None or self._loading.get_name() != self.incarnation:
            self.stop_loading()
            if model := self.model:
                self.loaded_share = 1.0
                return model
            self._loading = asyncio.create_task(self._load(), name=self.incarnation)
        loading = self._loading
        try:
            return await asyncio.shield(loading)
        finally:
            if loading.done():
                self._loading = None

    def stop_loading(self) -> None:
        """Cancels the loading, and drops its result."""
        loading, self._loading = self._loading, None
        if loading is not None and not loading.cancel() and not loading.cancelled():
            loading.exception()

    async def _load(self) -> LoadedModel:
        with self._explained():
            if self.state is WorkerState.CREATED:
                await self._init_device()
            return await self._load_model()

    async def _init_device(self) -> None:
        device = self._configuration.device
        with self._phase(StartPhase.INIT_DEVICE), self._spans.step("init_device"):
            request = DeviceRequest(DeviceType(device.device), Dtype(device.dtype), self._digest, self.parallel)
            await self.link.init_device(request)

    async def _load_model(self) -> LoadedModel:
        configuration = self._configuration
        model = model_source(configuration.model)
        begin, reported_at, self.loaded_share = asyncio.get_running_loop().time(), 0.0, 0.0
        fields = {"worker_address": self.address, "model": model or "demo", "incarnation": self.incarnation}
        log.info("the worker loads the model", **fields)
        request = LoadRequest(
            model,
            configuration.model.revision,
            Quantization(configuration.device.quantization),
            LoadFormat(configuration.load.load_format),
            lora_limits(configuration.lora),
            parse_task(configuration.load.task),
            Dtype(configuration.cache.kv_cache_dtype),
        )
        with self._phase(StartPhase.LOAD_MODEL), self._spans.step("load_model") as span:
            async for event in self.link.load_model(request):
                if isinstance(event, LoadedModel):
                    self.note(state=WorkerState.LOADED, model=event)
                    self.loaded_share = 1.0
                    seconds = round(asyncio.get_running_loop().time() - begin, 2)
                    fields = {"worker_address": self.address, "architecture": event.architecture, "seconds": seconds}
                    log.info("the model is loaded", **fields)
                    span.set(architecture=event.architecture, parameter_bytes=event.parameter_bytes)
                    return event
                self.start = StartProgress(StartPhase.LOAD_MODEL, event)
                now = asyncio.get_running_loop().time()
                if event.total_bytes and now - reported_at >= PROGRESS_SECONDS:
                    reported_at = now
                    self._note_progress(event)
            raise NotReady("the worker ended LoadModel without a model")

    def _note_progress(self, progress: LoadProgress) -> None:
        self.loaded_share = progress.done_bytes / progress.total_bytes
        fields = {"done_bytes": progress.done_bytes, "total_bytes": progress.total_bytes}
        log.info("loading the model", worker_address=self.address, **fields)
        self._on_progress()

    async def reload(self, source: WeightsSource) -> None:
        with self._explained():
            await self.link.reload_weights(source)

    # The cache.

    async def determine_num_available_blocks(self, block_size: int) -> AvailableBlocks:
        """Asks how many blocks fit; with `block_size` 0 the worker chooses the size."""
        device, step = self._configuration.device, self._configuration.scheduler
        request = ProfileRequest(
            block_size=block_size,
            device_memory_utilization=device.device_memory_utilization,
            swap_space_bytes=int(device.swap_space_gib * 2**30),
            max_num_batched_tokens=step.max_num_batched_tokens,
            max_num_seqs=step.max_num_seqs,
            max_draft_rows=self._configuration.speculation.find_limits(self.parallel).max_draft_rows,
        )
        count = self._spans.step("determine_num_available_blocks")
        with self._explained(), self._phase(StartPhase.COUNT_BLOCKS), count:
            return await self.link.determine_num_available_blocks(request)

    async def initialize_cache(self, plan: CachePlan) -> CacheInfo:
        phase = self._phase(StartPhase.INITIALIZE_CACHE)
        with self._explained(), phase, self._spans.step("initialize_cache") as span:
            cache = await self.link.initialize_cache(plan)
            span.set(num_device_blocks=cache.num_device_blocks, num_host_blocks=cache.num_host_blocks)
        log.info(
            "the cache is ready",
            worker_address=self.address,
            block_size=cache.block_size,
            num_device_blocks=cache.num_device_blocks,
            num_host_blocks=cache.num_host_blocks,
            cache_block_bytes=cache.cache_block_bytes,
            max_model_len=cache.max_model_len,
        )
        self.note(state=WorkerState.CACHE_READY, cache=cache)
        return cache

    # The group.

    async def open_rendezvous(self, epoch: int, members: Sequence[str]) -> MeetingPoint:
        with self._explained(_TRANSIENT_OF_GROUPS):
            return await self.link.open_rendezvous(epoch, members)

    async def form_group(
        self, epoch: int, members: Sequence[str], timeout_seconds: float, meeting: MeetingPoint | None
    ) -> str:
        """Joins a group, or takes the present one over; returns how its ranks reach each other."""
        with self._explained(_TRANSIENT_OF_GROUPS):
            return await self.link.form_group(epoch, members, timeout_seconds, meeting)

    async def leave_group(self, epoch: int, reason: str) -> None:
        """Leaves a group, if the worker can be asked to."""
        with suppress(BlockyardError):
            await self.link.leave_group(epoch, reason)
