"""One replica's life: set the worker up, run an epoch of steps, give all requests back when it breaks, begin again.

Owns the core's scheduler of this replica. Knows no gateway: requests come from its `EngineEvents` and go back there.
Never waits for anything but its replica.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol

from blockyard.contract.scheduling import ModelFacts, Readiness
from blockyard.contract.workers import CacheInfo, WorkerState
from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.replicas.circuit_breaker import SOUND_STEPS, CircuitBreaker
from scheduler_service.replicas.drain import Drain
from scheduler_service.replicas.epoch_failure import (
    DRAINED,
    LAST_FAILURE_RETRY_SECONDS,
    EpochFailure,
    Unusable,
    all_sequences,
    is_break,
    named_sequences,
)
from scheduler_service.replicas.loras.replica_loras import ReplicaLoras
from scheduler_service.replicas.rank import lora_limits
from scheduler_service.replicas.replica import Replica
from scheduler_service.replicas.step_loop import StepEvents, StepLoop
from scheduler_service.replicas.steps.answer_checks import AnswerLimits, WrongAnswer
from scheduler_service.replicas.steps.steps_in_flight import MAX_STEPS_IN_FLIGHT, PipelineDepth, StepDeadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.core.recovery import Evacuated, Suspects
    from scheduler_service.replicas.steps.step_metrics import StepMeter
    from scheduler_service.replicas.worker_link import WorkerLink

log = EventLogger(__name__)

# An epoch that broke before it answered anything may break again at once.
BROKEN_EPOCH_SECONDS = 0.5


class EngineEvents(StepEvents, Protocol):
    def on_worker_lost(self, engine: Engine, failure: EpochFailure) -> None:
        """An epoch broke: takes all requests of the replica back."""

    def on_readiness_changed(self, engine: Engine) -> None:
        """A replica became ready or not ready; its readiness has the reason."""

    def may_claim(self, engine: Engine, incarnation: str) -> bool:
        """Whether no other replica has this worker."""
        ...

    def may_serve(self, engine: Engine, facts: ModelFacts) -> bool:
        """Whether all other replicas that serve have the same model."""
        ...

    def serves_without(self, engine: Engine) -> bool:
        """Whether another replica takes requests."""
        ...


class Engine:
    """Serves from one replica, for ever. When its worker is lost, it gives its requests back and begins anew."""

    def __init__(
        self,
        replica_id: int,
        links: Sequence[WorkerLink],
        configuration: SchedulerConfiguration,
        events: EngineEvents,
        suspects: Suspects,
        meter: StepMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica_id = replica_id
        self.replica = Replica(
            links,
            configuration,
            self._set_readiness,
            may_claim=lambda found: events.may_claim(self, found),
            may_serve=lambda facts: events.may_serve(self, facts),
        )
        self.loras = ReplicaLoras(self.replica.ranks, lora_limits(configuration.lora).max_cpu_loras)
        self.loras.find_used = lambda: self.scheduler.used_lora_ids if self.scheduler else ()
        self.breaker = CircuitBreaker()
        self.drain = Drain()
        self.step_loop = StepLoop(
            replica_id,
            events,
            self.breaker,
            self.drain,
            meter,
            StepDeadline(configuration.service.step_deadline_seconds),
            _make_pipeline(configuration),
            serves_without=lambda: events.serves_without(self),
            clock=clock,
        )
        self.scheduler: Scheduler | None = None
        self.facts: ModelFacts | None = None
        self.readiness = Readiness(False, "the scheduler has just started")
        # The level at which it sleeps; 0: it is awake.
        self.sleep_level = 0
        self._configuration = configuration
        self._events = events
        self._suspects = suspects
        self._clock = clock
        # Cancellation may fail to end `run`: a task group in which a task fails at that moment swallows it.
        self._is_closed = False

    @property
    def is_ready(self) -> bool:
        return self.readiness.ready

    @property
    def is_asleep(self) -> bool:
        """Whether the replica was put to sleep and has no requests left, or a worker was found asleep."""
        if self.takes_requests:
            return False
        was_put = self.sleep_level > 0 and self.drain.is_done
        return was_put or any(rank.state is WorkerState.SLEEPING for rank in self.replica.ranks)

    @property
    def takes_requests(self) -> bool:
        return self.readiness.ready and not self.drain.is_wanted

    def reconsider(self) -> None:
        """Another replica became ready or not ready: a drain may now hand its requests over, or must finish them."""
        if self.drain.is_wanted:
            self.drain.reconsider()
            self.wake()

    def wake(self) -> None:
        self.step_loop.wake()

    def close(self) -> None:
        """Begins no further epoch, and writes the totals."""
        self._is_closed = True
        if self.scheduler:
            self.step_loop.step_log.write_totals(self.scheduler.stats(), self._clock())

    # Epochs.

    async def run(self) -> None:
        """Sets the replica up, serves until its epoch breaks, and begins again unless it was closed.

        No failure ends more than the epoch, except Unusable if no other replica serves.
        """
        while not self._is_closed:
            try:
                await self._run_epoch()
            except Unusable as error:
                if not self._events.serves_without(self):
                    raise
                self.set_not_ready(str(error))
                await asyncio.sleep(LAST_FAILURE_RETRY_SECONDS)
            except Exception:  # the boundary: a failure here must not reach the other replicas
                log.exception("a replica failed", replica_id=self.replica_id, worker_address=self.replica.address)
                self._lose(_make_failure(), self.replica.epoch)
                await asyncio.sleep(BROKEN_EPOCH_SECONDS)

    async def _run_epoch(self) -> None:
        if self.drain.is_wanted:
            self.set_not_ready(self.drain.message)
            await self.drain.rest(self.replica.look)
        set_up = await self.drain.unless_wanted(self._set_up())
        if set_up is None:
            return
        facts, cache = set_up
        self.loras.look()
        scheduler = self._prepare(facts, cache)
        scheduler.seed_pace(cache.decode_rows, cache.decode_seconds)
        self.breaker.begin_epoch(self.replica.incarnations)
        limits = AnswerLimits(
            facts.vocab_size,
            facts.max_model_len,
            scheduler.config.max_rows,
            scheduler.config.max_draft_tokens,
            scheduler.config.max_draft_rows,
        )
        steps = self.replica.open_steps(limits, lambda: self.step_loop.in_flight.timeout_seconds)
        self.facts = facts
        self._set_readiness(Readiness(True))
        log.info(
            "ready",
            epoch=steps.epoch,
            replica_id=self.replica_id,
            worker_address=self.replica.address,
            max_model_len=facts.max_model_len,
        )
        num_steps = self.step_loop.step_log.num_steps
        try:
            await self.step_loop.run(scheduler, steps, [self.loras.keep()] if scheduler.config.max_loras else [])
        except ExceptionGroup as errors:
            self._lose(_find_cause(errors), steps.epoch)
        finally:
            steps.cancel()
        if self.step_loop.step_log.num_steps == num_steps and not self.drain.is_wanted:
            await asyncio.sleep(BROKEN_EPOCH_SECONDS)

    async def _set_up(self) -> tuple[ModelFacts, CacheInfo]:
        if seconds := self.breaker.pause_seconds:
            num_broken = self.breaker.num_unsound_epochs
            cause = f"{num_broken} epochs in a row broke before {SOUND_STEPS} steps were answered"
            message = f"left aside for {seconds:g} s: {cause}"
            log.warning("a worker is left aside", replica_id=self.replica_id, seconds=seconds)
            self.set_not_ready(f"{message}; {self.readiness.message}")
            await self.breaker.back_off(self.replica, self._clock)
        return await self.replica.set_up()

    def set_not_ready(self, message: str) -> None:
        self._set_readiness(Readiness(False, message))

    def _set_readiness(self, readiness: Readiness) -> None:
        self.readiness = readiness
        self._events.on_readiness_changed(self)

    def _prepare(self, facts: ModelFacts, cache: CacheInfo) -> Scheduler:
        """Returns the present scheduler if it fits these weights and pools, or a new one."""
        wanted = make_core_config(
            self._configuration, cache, facts.weights_version, whole_prompts=facts.max_prompt_len > 0
        )
        if self.scheduler is not None and self.scheduler.config == wanted:
            return self.scheduler
        if self.scheduler is not None:
            log.info(
                "the worker has other pools or weights",
                num_device_blocks=cache.num_device_blocks,
                version=facts.weights_version,
            )
        return self._begin_anew(wanted)

    def _begin_anew(self, config: CoreConfig) -> Scheduler:
        predecessor, self.scheduler = self.scheduler, Scheduler(config, self._suspects)
        if predecessor is not None:
            self.scheduler.succeed(predecessor)
        return self.scheduler

    def _evacuate(self, scheduler: Scheduler) -> list[Evacuated]:
        """Gives all requests up. The dispatcher fails those that are missing from the result."""
        try:
            return scheduler.evacuate()
        except Exception:  # the failure may have left an answer half applied
            log.exception("the state of a replica is broken", replica_id=self.replica_id)
            self._begin_anew(scheduler.config)
            return []

    def _lose(self, error: BlockyardError, epoch: int) -> None:
        """Gives all requests back after the step stream broke: all KV is lost with it."""
        scheduler, facts, step = self.scheduler, self.facts, self.step_loop.in_flight.oldest
        self.loras.forget()
        if scheduler is None or facts is None:
            self.set_not_ready(error.message)
            return
        was_refused = not (is_break(error) or isinstance(error, WrongAnswer) or step is None)
        named = scheduler.count_outputs(named_sequences(step, error)) if was_refused and step else {}
        refused = scheduler.count_outputs(all_sequences(step)) if was_refused and step and not named else named
        in_hand = named or scheduler.count_outputs(self.step_loop.in_flight.sequence_ids)
        self.step_loop.on_epoch_broken()
        failure = EpochFailure(error, facts, in_hand, refused, self._evacuate(scheduler), self.breaker.is_sound)
        was_drained = self.drain.is_wanted and error.reason is Reason.DRAINING
        # A refusal that names its requests is no sign against the worker or the other requests.
        if not (was_drained or named):
            self.breaker.on_epoch_broken()
        write = log.info if was_drained else log.warning
        write(
            DRAINED if was_drained else "the worker was lost",
            replica_id=self.replica_id,
            worker_address=self.replica.address,
            epoch=epoch,
            incarnation="+".join(self.replica.incarnations),
            reason=error.message,
            num_requests=sum(num_tokens > 0 for _, num_tokens in failure.evacuated),
            num_tokens=sum(num_tokens for _, num_tokens in failure.evacuated),
        )
        message = self.drain.message if was_drained else f"the worker was lost: {error.message}"
        self.readiness = Readiness(False, message)
        self._events.on_worker_lost(self, failure)
        self._events.on_readiness_changed(self)


def _find_cause(errors: ExceptionGroup[Exception]) -> BlockyardError:
    """Finds what broke an epoch: if several tasks failed, the error that says most."""
    if errors.split(BlockyardError)[1] is not None:
        log.exception("an epoch failed: a bug")
        return _make_failure()
    causes = [error for error in errors.exceptions if isinstance(error, BlockyardError)]
    return next((error for error in causes if not is_break(error)), causes[0])


def _make_failure() -> WrongAnswer:
    """Makes the error of an unexpected failure, which no single request is to blame for."""
    return WrongAnswer("the worker's answer could not be applied; the scheduler's log has more")


def _make_pipeline(configuration: SchedulerConfiguration) -> PipelineDepth:
    """Makes the depth of the pipeline: with pipeline stages, a fixed one for each virtual engine."""
    num_engines = configuration.parallel.num_virtual_engines
    return PipelineDepth(num_engines, is_fixed=True) if num_engines > 1 else PipelineDepth()


def make_core_config(
    configuration: SchedulerConfiguration, cache: CacheInfo, weights_version: str = "", *, whole_prompts: bool = False
) -> CoreConfig:
    settings = configuration.scheduler
    return CoreConfig(
        block_size=cache.block_size,
        num_device_blocks=cache.num_device_blocks,
        num_host_blocks=cache.num_host_blocks,
        max_model_len=cache.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_chunk=settings.max_prefill_chunk,
        target_step_seconds=settings.inter_token_latency_target_ms / 1000,
        policy=settings.policy,
        aging_seconds=settings.aging_seconds,
        victims=settings.victims,
        preemption_mode=settings.preemption_mode,
        enable_prefix_caching=configuration.cache.enable_prefix_caching and not whole_prompts,
        enable_host_prefix_cache=configuration.cache.enable_host_prefix_cache,
        max_steps_in_flight=max(MAX_STEPS_IN_FLIGHT, configuration.parallel.num_virtual_engines),
        num_virtual_engines=configuration.parallel.num_virtual_engines,
        max_loras=configuration.lora.max_loras,
        lora_patience_seconds=configuration.lora.lora_patience_seconds,
        debug_integrity=configuration.service.debug_integrity,
        weights_version=weights_version,
        whole_prompts=whole_prompts,
        kv_windows=cache.kv_windows,
        num_state_blocks=cache.num_state_blocks,
        state_snapshot_tokens=configuration.cache.state_snapshot_tokens,
        **configuration.draft_limits(cache.num_state_blocks)._asdict(),
        prices_drafts=configuration.speculation.speculation == "auto",
    )
