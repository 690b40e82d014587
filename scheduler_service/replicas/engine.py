"""One replica's loop: schedule, send, process, publish, with the next steps on their way before the last answer is in.

Owns the core's scheduler of this replica. Knows no gateway: requests come from its `EngineEvents`, which learn what
becomes of them. It never waits for anybody but its replica.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.telemetry import EventLogger
from scheduler_service.core.scheduler import CoreConfig, Scheduler, StepMismatch
from scheduler_service.replicas.conduct import Conduct
from scheduler_service.replicas.drain import Drain
from scheduler_service.replicas.engine_events import DRAINED, EngineEvents, Loss, is_break
from scheduler_service.replicas.facts import Readiness
from scheduler_service.replicas.refusals import named_sequences
from scheduler_service.replicas.replica import LAST_FAILURE_RETRY_SECONDS, Replica, Unusable
from scheduler_service.replicas.steps.answer_checks import AnswerLimits, WrongAnswer
from scheduler_service.replicas.steps.pipeline_depth import MAX_STEPS_IN_FLIGHT, PipelineDepth
from scheduler_service.replicas.steps.step_deadline import StepDeadline
from scheduler_service.replicas.steps.step_log import StepLog
from scheduler_service.replicas.steps.steps_in_flight import StepsInFlight

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.core.recovery import Evacuated, Suspects
    from scheduler_service.core.values import OwnerUpdate, SchedulerOutput, StepResult
    from scheduler_service.replicas.facts import CacheInfo, ModelFacts
    from scheduler_service.replicas.steps.step_meter import StepMeter
    from scheduler_service.replicas.worker_link import StepStream, WorkerLink

log = EventLogger(__name__)

# An epoch that broke before it answered anything may break again at once.
BROKEN_EPOCH_SECONDS = 0.5


class Engine:
    """Serves from one replica, for ever. The loss of its worker gives its requests back and begins another epoch."""

    def __init__(
        self,
        replica_id: int,
        link: WorkerLink,
        configuration: SchedulerConfiguration,
        events: EngineEvents,
        suspects: Suspects,
        meter: StepMeter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.replica_id = replica_id
        self.replica = Replica(
            link,
            configuration,
            self._set_not_ready,
            may_claim=lambda found: events.may_claim(self, found),
            may_serve=lambda facts: events.may_serve(self, facts),
        )
        self.conduct = Conduct()
        self.step_log = StepLog()
        self.meter = meter
        self.scheduler: Scheduler | None = None
        self.facts: ModelFacts | None = None
        self.readiness = Readiness(False, "the scheduler has just started")
        self.last_step_id = 0
        self.drain = Drain()
        self._configuration = configuration
        self._events = events
        self._suspects = suspects
        self._clock = clock
        self._pipeline = PipelineDepth()
        self._in_flight = StepsInFlight(StepDeadline(configuration.service.step_deadline_seconds), clock)
        # Cancelling alone may fail to end `run`: a task group in which a task fails at that moment swallows it.
        self._is_closed = False
        # Set when there may be something to schedule.
        self._work = asyncio.Event()
        self._is_sending = False

    @property
    def is_ready(self) -> bool:
        """Whether the replica takes steps."""
        return self.readiness.ready

    @property
    def takes_requests(self) -> bool:
        """Whether it does so for new requests too."""
        return self.readiness.ready and not self.drain.is_wanted

    @property
    def steps_in_flight(self) -> StepsInFlight:
        """The steps on their way."""
        return self._in_flight

    def reconsider(self) -> None:
        """Another replica became ready, or is not any more: who drains may hand over what it has, or must go on."""
        if self.drain.is_wanted:
            self.drain.reconsider()
            self.wake()

    def wake(self) -> None:
        """There may be something to schedule."""
        self._work.set()

    def close(self) -> None:
        """Begins no further epoch, and writes the totals."""
        self._is_closed = True
        if self.scheduler:
            self.step_log.write_totals(self.scheduler.stats(), self._clock())

    # Epochs.

    async def run(self) -> None:
        """Sets the replica up, serves until its epoch breaks, and begins again unless it was closed.

        Nothing that happens on the way ends more than the epoch, but for Unusable where no other replica serves.
        """
        while not self._is_closed:
            try:
                await self._run_epoch()
            except Unusable as error:
                if not self._events.serves_without(self):
                    raise
                self._set_not_ready(str(error))
                await asyncio.sleep(LAST_FAILURE_RETRY_SECONDS)
            except Exception:  # the boundary: whatever breaks here must leave the other replicas alone
                log.exception("a replica failed", replica_id=self.replica_id, worker_address=self.replica.address)
                self._lose(_make_failure(), self.replica.epoch)
                await asyncio.sleep(BROKEN_EPOCH_SECONDS)

    async def _run_epoch(self) -> None:
        if self.drain.is_wanted:
            self._set_not_ready(DRAINED)
            await self.drain.rest(self.replica.look)
        set_up = await self.drain.unless_wanted(self._set_up())
        if set_up is None:
            return
        facts, cache = set_up
        scheduler = self._prepare(cache)
        assert self.replica.worker is not None
        self.conduct.begin_epoch(self.replica.worker.incarnation)
        steps = self.replica.open_steps(AnswerLimits(facts.vocab_size, facts.max_model_len, scheduler.config.max_rows))
        self.facts = facts
        self._set_readiness(Readiness(True))
        log.info(
            "ready",
            epoch=steps.epoch,
            replica_id=self.replica_id,
            worker_address=self.replica.address,
            max_model_len=facts.max_model_len,
        )
        num_steps = self.step_log.num_steps
        try:
            await self._serve(steps)
        except ExceptionGroup as errors:
            self._lose(_find_cause(errors), steps.epoch)
        finally:
            steps.cancel()
        if self.step_log.num_steps == num_steps and not self.drain.is_wanted:
            await asyncio.sleep(BROKEN_EPOCH_SECONDS)

    async def _set_up(self) -> tuple[ModelFacts, CacheInfo]:
        if seconds := self.conduct.pause_seconds:
            message = f"left aside for {seconds:g} s: {self.conduct.num_unsound_epochs} epochs in a row broke at once"
            log.warning("a worker is left aside", replica_id=self.replica_id, seconds=seconds)
            self._set_not_ready(f"{message}; {self.readiness.message}")
            await self.conduct.sit_out(self.replica, self._clock)
        return await self.replica.set_up()

    def _set_not_ready(self, message: str) -> None:
        self._set_readiness(Readiness(False, message))

    def _set_readiness(self, readiness: Readiness) -> None:
        self.readiness = readiness
        self._events.on_readiness_changed(self)

    def _prepare(self, cache: CacheInfo) -> Scheduler:
        """Makes a scheduler for these pools, unless there is one."""
        wanted = make_core_config(self._configuration, cache)
        if self.scheduler is not None and self.scheduler.config == wanted:
            return self.scheduler
        if self.scheduler is not None:
            log.warning("the worker has other pools", num_device_blocks=cache.num_device_blocks)
        return self._begin_anew(wanted)

    def _begin_anew(self, config: CoreConfig) -> Scheduler:
        predecessor, self.scheduler = self.scheduler, Scheduler(config, self._suspects)
        if predecessor is not None:
            self.scheduler.succeed(predecessor)
        return self.scheduler

    def _evacuate(self, scheduler: Scheduler) -> list[Evacuated]:
        """Gives everything up. What cannot be recovered is left out: the dispatcher fails it."""
        try:
            return scheduler.evacuate()
        except Exception:  # what broke the epoch may have left half of an answer behind
            log.exception("the state of a replica is broken", replica_id=self.replica_id)
            self._begin_anew(scheduler.config)
            return []

    def _lose(self, error: BlockyardError, epoch: int) -> None:
        """Gives everything back that the worker had: its step stream is gone, and with it all KV."""
        scheduler, facts, step = self.scheduler, self.facts, self._in_flight.oldest
        if scheduler is None or facts is None:
            self._set_not_ready(error.message)
            return
        was_refused = not (is_break(error) or isinstance(error, WrongAnswer) or step is None)
        named = scheduler.count_outputs(named_sequences(step, error)) if was_refused and step else {}
        in_hand = scheduler.count_outputs(self._in_flight.sequence_ids)
        self._in_flight.begin_epoch()
        self.meter.on_lost(self._clock())
        loss = Loss(error, facts, in_hand, named, self._evacuate(scheduler), self.conduct.is_sound)
        worker = self.replica.worker
        was_drained = self.drain.is_wanted and error.reason is Reason.DRAINING
        if not was_drained:
            self.conduct.on_epoch_broken()
        write = log.info if was_drained else log.warning
        write(
            DRAINED if was_drained else "the worker was lost",
            replica_id=self.replica_id,
            worker_address=self.replica.address,
            epoch=epoch,
            incarnation=worker.incarnation if worker else "",
            reason=error.message,
            num_requests=sum(num_tokens > 0 for _, num_tokens in loss.evacuated),
            num_tokens=sum(num_tokens for _, num_tokens in loss.evacuated),
        )
        self.readiness = Readiness(False, DRAINED if was_drained else f"the worker was lost: {error.message}")
        self._events.on_worker_lost(self, loss)
        self._events.on_readiness_changed(self)

    # The loop.

    async def _serve(self, steps: StepStream) -> None:
        """Runs one epoch until its stream breaks: an ExceptionGroup with a BlockyardError."""
        self._in_flight.begin_epoch()
        self._work.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._in_flight.watch())
            group.create_task(self._leave_when_drained())
            group.create_task(self._send_steps(steps))
            group.create_task(self._receive_answers(steps))

    async def _leave_when_drained(self) -> None:
        await self.drain.wait_until(self._may_leave)
        raise BlockyardError(Reason.DRAINING, DRAINED)

    def _may_leave(self) -> bool:
        """Whether a drain need not wait: for the steps on their way, and what nobody else could go on with."""
        assert self.scheduler is not None
        if not self.drain.is_wanted or self._in_flight:
            return False
        return self._events.serves_without(self) or not self.scheduler.has_unfinished()

    async def _send_steps(self, steps: StepStream) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._send_due(steps)

    async def _send_due(self, steps: StepStream) -> None:
        """Sends what there is to compute. Whoever is at it goes on until nothing is left."""
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while output := self._schedule(steps.epoch):
                await steps.send(output)
                self.meter.on_sent(steps.encode_seconds)
        finally:
            self._is_sending = False

    async def _receive_answers(self, steps: StepStream) -> None:
        while True:
            updates = self._process(await steps.receive())
            self._pipeline.on_answered(steps.step_seconds)
            faults.reach(faults.BEFORE_PUBLISH)
            self._publish(updates)
            if self.drain.is_wanted:
                self.drain.reconsider()
            # Here and not in the other task: to change tasks costs as much as to schedule. What was published leaves
            # behind it, since the worker's next step is what must not be late.
            await self._send_due(steps)

    def _schedule(self, epoch: int) -> SchedulerOutput | None:
        assert self.scheduler is not None
        if len(self._in_flight) >= self._pipeline.depth:
            return None
        if self.drain.is_wanted and self._events.serves_without(self):
            # What it has goes on there, once the steps on their way are answered.
            return None
        self._events.dispatch()
        if not self.scheduler.can_schedule():
            return None
        begin = time.perf_counter()
        output = self.scheduler.schedule(self._clock())
        if output is None and not self._in_flight and self.scheduler.can_schedule():
            # No answer will come that could change anything. Asked again, the core makes room by force.
            log.error("nothing could be scheduled: a bug", epoch=epoch, after_step_id=self.last_step_id)
            output = self.scheduler.schedule(self._clock())
        if output:
            self._in_flight.on_sent(output)
            seconds = time.perf_counter() - begin
            self.step_log.on_scheduled(output, epoch, seconds)
            self.meter.on_scheduled(output.step_id, seconds)
            self._events.on_step_scheduled(self, output)
        return output

    def _process(self, result: StepResult) -> dict[str, OwnerUpdate]:
        assert self.scheduler is not None
        begin = time.perf_counter()
        try:
            updates = self.scheduler.update(result)
        except StepMismatch as error:
            raise WrongAnswer(str(error)) from None
        seconds = time.perf_counter() - begin
        self.step_log.on_answered(result, seconds)
        self.meter.on_answered(result, seconds, self._in_flight.on_answered())
        self.last_step_id = result.step_id
        self.conduct.on_answered()
        return updates

    def _publish(self, updates: dict[str, OwnerUpdate]) -> None:
        assert self.scheduler is not None
        self._events.publish(updates)
        self._events.on_requests_ended(self.scheduler.take_ended())
        now = self._clock()
        if self.step_log.is_due(now):
            self.step_log.write_totals(self.scheduler.stats(), now)


def _find_cause(errors: ExceptionGroup[Exception]) -> BlockyardError:
    """What broke an epoch: if both directions noticed, the one that says more than that."""
    if errors.split(BlockyardError)[1] is not None:
        log.exception("an epoch failed: a bug")
        return _make_failure()
    causes = [error for error in errors.exceptions if isinstance(error, BlockyardError)]
    return next((error for error in causes if not is_break(error)), causes[0])


def _make_failure() -> WrongAnswer:
    """What nobody thought of, at the hand of an answer or not. No request is to blame alone for it."""
    return WrongAnswer("nothing can be made of it")


def make_core_config(configuration: SchedulerConfiguration, cache: CacheInfo) -> CoreConfig:
    """What the core may use of a replica with these pools."""
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
        enable_prefix_caching=configuration.cache.enable_prefix_caching,
        enable_host_prefix_cache=configuration.cache.enable_host_prefix_cache,
        max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
        debug_integrity=configuration.service.debug_integrity,
    )
