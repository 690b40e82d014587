"""One worker, seen from the scheduler: sets it up until it is CACHE_READY, and opens epochs on it.

Owns what is known of the worker. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from scheduler_service.config import model_source
from scheduler_service.replicas.facts import CachePlan, LoadedModel, ModelFacts, WorkerState
from scheduler_service.replicas.start_spans import StartSpans
from scheduler_service.replicas.steps.answer_checks import AnswerLimits, WrongAnswer

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.configuration import SchedulerSettings
    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.replicas.facts import AvailableBlocks, CacheInfo, LoadProgress, WorkerInfo
    from scheduler_service.replicas.worker_link import StepStream, WorkerLink

log = EventLogger(__name__)

API_VERSION = "v1"
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 1.0
# A worker that answers with an error is asked again, since a folder can be repaired, but a set-up is heavy work.
LAST_FAILURE_RETRY_SECONDS = 10.0
# Services that start together need not warn of each other.
START_SECONDS = 10.0
# A worker that comes back is a pause for its clients: it is looked for more often.
UNREACHABLE_RETRY_SECONDS = 0.25
PROGRESS_SECONDS = 2.0


class NotReady(Exception):
    """The replica cannot be set up now; the message tells a person why."""


class Misconfigured(NotReady):
    """This worker process can never serve this configuration."""


class Unusable(Exception):
    """The first worker cannot be set up, and nobody is to wait for a repair; the message tells a person why."""


def configuration_digest(configuration: SchedulerConfiguration) -> str:
    """Hashes all settings that a worker gets: a worker with this digest can be taken over as it is."""
    device, cache, step = configuration.device, configuration.cache, configuration.scheduler
    settings = [
        (API_VERSION, model_source(configuration.model), configuration.model.revision),
        (device.device, device.dtype, device.quantization, device.device_memory_utilization, device.swap_space_gib),
        (configuration.load.load_format,),
        (cache.block_size, cache.num_device_blocks, cache.num_host_blocks),
        (step.max_model_len, step.max_num_seqs, step.max_num_batched_tokens),
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def plan_cache(
    configuration: SchedulerConfiguration, available: AvailableBlocks, model_max_model_len: int
) -> CachePlan:
    """Decides the pools and the model's length; raises Misconfigured where the settings ask for what cannot be."""
    cache, step = configuration.cache, configuration.scheduler
    num_device_blocks = cache.num_device_blocks or available.num_device_blocks
    capacity = (num_device_blocks - 1) * available.block_size
    if capacity <= 0:
        raise Misconfigured(
            f"{num_device_blocks} device blocks leave no room for any token: the memory is too small"
            " (see --device-memory-utilization)"
        )
    asked = step.max_model_len
    if asked != "auto" and asked > model_max_model_len:
        raise Misconfigured(f"--max-model-len {asked} is above the {model_max_model_len} tokens of the model")
    if asked != "auto" and asked > capacity:
        raise Misconfigured(
            f"--max-model-len {asked} is above the {capacity} tokens that {num_device_blocks} device blocks hold"
            " (block 0 is scratch)"
        )
    return CachePlan(
        block_size=available.block_size,
        num_device_blocks=num_device_blocks,
        num_host_blocks=cache.num_host_blocks if cache.num_host_blocks >= 0 else available.num_host_blocks,
        max_model_len=min(model_max_model_len, capacity) if asked == "auto" else asked,
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_num_seqs=step.max_num_seqs,
    )


@dataclass(slots=True)
class _Progress:
    """Reports how far loading is, every few seconds at most."""

    report: Callable[[str], None]
    worker_address: str
    reported_at: float = 0.0

    def on_progress(self, progress: LoadProgress) -> None:
        now = time.monotonic()
        if now - self.reported_at < PROGRESS_SECONDS or not progress.total_bytes:
            return
        self.reported_at = now
        share = progress.done_bytes / progress.total_bytes
        log.info(
            "loading the model",
            worker_address=self.worker_address,
            done_bytes=progress.done_bytes,
            total_bytes=progress.total_bytes,
        )
        self.report(f"the worker is loading the model: {share:.0%}")


class Replica:
    """One worker and what is known of it. `report` is called with what is missing, each time that changes."""

    def __init__(
        self,
        link: WorkerLink,
        configuration: SchedulerConfiguration,
        report: Callable[[str], None],
        may_claim: Callable[[str], bool] = lambda incarnation: True,
        may_serve: Callable[[ModelFacts], bool] = lambda facts: True,
    ) -> None:
        self.worker: WorkerInfo | None = None
        self.message = ""
        self._reported = ("", False)
        self.epoch = 0
        self._link = link
        self._configuration = configuration
        self._digest = configuration_digest(configuration)
        self._report = report
        # Asked whether the worker with this incarnation is nobody else's.
        self._may_claim = may_claim
        # Asked whether this is the model of all others that serve.
        self._may_serve = may_serve
        # The incarnation that cannot serve this configuration, and why.
        self._hopeless: tuple[str, str] | None = None
        # The incarnation that was asked to end.
        self._dismissed = ""

    @property
    def address(self) -> str:
        """The worker's address."""
        return self._link.address

    @property
    def state(self) -> WorkerState:
        """The worker's state when it last answered."""
        return self.worker.state if self.worker else WorkerState.UNREACHABLE

    async def set_up(self) -> tuple[ModelFacts, CacheInfo]:
        """Waits for a worker and sets it up, for as long as that takes.

        Raises Unusable, unless it is to wait for a repair, when a worker that was never set up says that it cannot be.
        """
        delay, begin = FIRST_RETRY_SECONDS, time.monotonic()
        while True:
            longest, expected = LAST_FAILURE_RETRY_SECONDS, False
            try:
                return await self._set_up_once()
            except NotReady as error:
                longest, message = LAST_RETRY_SECONDS, str(error)
                needs_repair = isinstance(error, Misconfigured)
            except BlockyardError as error:
                message = f"the worker at {self.address}: {error.message}"
                needs_repair = error.reason is not Reason.NO_READY_WORKER and not isinstance(error, WrongAnswer)
                if error.reason is Reason.NO_READY_WORKER:
                    self.worker = None
                    longest, message = UNREACHABLE_RETRY_SECONDS, f"no worker answers at {self.address}"
                    expected = not self.epoch and time.monotonic() - begin < START_SECONDS
            if needs_repair and not self.epoch and not self._configuration.service.wait_for_repair:
                raise Unusable(message)
            self._report_missing(message, expected=expected)
            await asyncio.sleep(min(delay, longest))
            delay = min(2 * delay, LAST_FAILURE_RETRY_SECONDS)

    async def look(self) -> None:
        """Updates what is known of the worker, and changes nothing there."""
        try:
            self.worker = await self._link.info()
        except BlockyardError:
            self.worker = None

    def _report_missing(self, message: str, *, expected: bool) -> None:
        """Reports what is missing when that changes, and warns of it when it should not be missing any more."""
        if (message, expected) != self._reported:
            self._reported = (message, expected)
            (log.info if expected else log.warning)("the replica is not ready", reason=message)
        if message != self.message:
            self.message = message
            self._report(message)

    async def _set_up_once(self) -> tuple[ModelFacts, CacheInfo]:
        worker = self.worker = await self._link.info()
        await self._check(worker)
        spans = StartSpans(worker_address=self.address, incarnation=worker.incarnation)
        try:
            with spans.all():
                model = worker.model or await self._load(worker, spans)
                cache = worker.cache or await self._initialize_cache(model, spans)
        except Misconfigured as error:
            self._hopeless = (worker.incarnation, str(error))
            raise
        # What the worker says of itself now, its epoch above all.
        self.worker = await self._link.info()
        facts = _make_facts(model, cache, self._configuration.scheduler)
        if not self._may_serve(facts):
            raise NotReady("the worker has loaded another model than those that serve: give all of them one --model")
        self.message, self._reported = "", ("", False)
        return facts, cache

    async def _check(self, worker: WorkerInfo) -> None:
        """Raises NotReady for a worker that cannot become ours."""
        if worker.api_version != API_VERSION:
            raise NotReady(f"the worker speaks api version {worker.api_version!r}, not {API_VERSION!r}")
        if worker.state is WorkerState.UNSPECIFIED:
            raise NotReady("the worker is in a state that this scheduler does not know")
        if worker.draining:
            raise NotReady("the worker is stopping; waiting for its successor")
        if not self._may_claim(worker.incarnation):
            raise NotReady("the worker is another replica's, found by another name")
        if self._hopeless and self._hopeless[0] == worker.incarnation:
            raise NotReady(self._hopeless[1])
        if worker.state is WorkerState.CREATED or worker.configuration_digest == self._digest:
            return
        if worker.incarnation != self._dismissed:
            address, incarnation = self.address, worker.incarnation
            log.info("ending a worker of another configuration", worker_address=address, incarnation=incarnation)
            await self._link.shutdown("another configuration")
            self._dismissed = worker.incarnation
        raise NotReady("the worker had another configuration and was told to end; waiting for its successor")

    async def _load(self, worker: WorkerInfo, spans: StartSpans) -> LoadedModel:
        model, device = model_source(self._configuration.model), self._configuration.device
        if worker.state is WorkerState.CREATED:
            with spans.step("init_device"):
                await self._link.init_device(device.device, device.dtype, self._digest)
        begin, address = time.monotonic(), self.address
        progress = _Progress(self._report, address)
        fields = {"worker_address": address, "model": model or "demo", "incarnation": worker.incarnation}
        log.info("the worker loads the model", **fields)
        revision, load_format = self._configuration.model.revision, self._configuration.load.load_format
        with spans.step("load_model") as span:
            async for event in self._link.load_model(model, revision, device.quantization, load_format):
                if isinstance(event, LoadedModel):
                    self._note(state=WorkerState.LOADED, model=event)
                    seconds = round(time.monotonic() - begin, 2)
                    fields = {"worker_address": address, "architecture": event.architecture, "seconds": seconds}
                    log.info("the model is loaded", **fields)
                    span.set(architecture=event.architecture, parameter_bytes=event.parameter_bytes)
                    return event
                progress.on_progress(event)
            raise NotReady("the worker ended LoadModel without a model")

    async def _initialize_cache(self, model: LoadedModel, spans: StartSpans) -> CacheInfo:
        configuration = self._configuration
        with spans.step("determine_num_available_blocks"):
            available = await self._link.determine_num_available_blocks(
                block_size=configuration.cache.block_size,
                device_memory_utilization=configuration.device.device_memory_utilization,
                swap_space_bytes=int(configuration.device.swap_space_gib * 2**30),
                max_num_batched_tokens=configuration.scheduler.max_num_batched_tokens,
                max_num_seqs=configuration.scheduler.max_num_seqs,
            )
        plan = plan_cache(configuration, available, model.max_model_len)
        if plan.max_model_len < model.max_model_len:
            log.info(
                "the model's length is limited", max_model_len=plan.max_model_len, of_the_model=model.max_model_len
            )
        with spans.step("initialize_cache") as span:
            cache = await self._link.initialize_cache(plan)
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
        self._note(state=WorkerState.CACHE_READY, cache=cache)
        return cache

    def _note(self, **changes: object) -> None:
        if self.worker:
            self.worker = replace(self.worker, **changes)  # type: ignore[arg-type]

    def open_steps(self, limits: AnswerLimits) -> StepStream:
        """Opens the next epoch's step stream, after `set_up`."""
        assert self.worker is not None
        self.epoch = self.worker.epoch + 1
        self._note(state=WorkerState.RUNNING, epoch=self.epoch)
        return self._link.open_steps(self.epoch, limits)


def _make_facts(model: LoadedModel, cache: CacheInfo, step: SchedulerSettings) -> ModelFacts:
    return ModelFacts(
        model_digest=model.model_digest,
        vocab_size=model.vocab_size,
        max_model_len=cache.max_model_len,
        block_size=cache.block_size,
        determinism_id=cache.determinism_id,
        batch_invariant=cache.batch_invariant,
        # Each sequence that runs has a token of every step.
        max_num_seqs=min(step.max_num_seqs, step.max_num_batched_tokens),
    )
