"""The loop: schedule, send, process, publish, with the next steps on their way before the last answer is in.

Owns the core's scheduler and the gateways' attachments. It never waits for a gateway, only for its replica.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from scheduler_service.attachment import Attachment
from scheduler_service.core.scheduler import DuplicateRequest, NeverFits, Scheduler, SchedulerConfig, StepMismatch
from scheduler_service.deadline import StepDeadline
from scheduler_service.deaths import Deaths
from scheduler_service.facts import Readiness
from scheduler_service.gateway_codec import Recovery
from scheduler_service.pace import MAX_STEPS_IN_FLIGHT, Pace
from scheduler_service.refusals import Refusals, named_sequences
from scheduler_service.replica import Replica
from scheduler_service.step_log import StepLog
from scheduler_service.watch import StepsInFlight

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.core.output import GroupSpec, OwnerUpdate, SchedulerOutput, SchedulerStats, StepResult
    from scheduler_service.facts import CacheInfo, ModelFacts
    from scheduler_service.gateway_codec import Abort
    from scheduler_service.worker_link import StepStream, WorkerLink

log = EventLogger(__name__)

RETRY_AFTER_SECONDS = 1.0
# What ends a stream without anybody being to blame: the process, the connection, or its own wish.
_BREAKS = (Reason.NO_READY_WORKER, Reason.DRAINING, Reason.CLIENT_CANCELLED)
# An epoch that broke before it answered anything may break again at once.
BROKEN_EPOCH_SECONDS = 0.5


class Engine:
    """Serves the attached gateways from one replica, for ever.

    The loss of the worker is a pause: what is not answered is forgotten, and the requests wait for an epoch to come.
    """

    def __init__(
        self, configuration: SchedulerConfiguration, link: WorkerLink, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replica = Replica(link, configuration, self._not_ready)
        self.step_log = StepLog()
        self._configuration = configuration
        self._clock = clock
        self._scheduler: Scheduler | None = None
        self._facts: ModelFacts | None = None
        self.readiness = Readiness(False, "the scheduler has just started")
        self.last_step_id = 0
        self._attachments: dict[str, Attachment] = {}
        self._num_attached = 0
        self._pace = Pace()
        self._in_flight = StepsInFlight(StepDeadline(configuration.service.step_deadline_seconds), clock)
        self._refusals = Refusals()
        self._deaths = Deaths()
        # What each gateway's requests lost, and to what, until they go on.
        self._lost: dict[str, OwnerUpdate] = {}
        self._cause = ""
        # Since no step was answered for want of a worker.
        self._lost_at: float | None = None
        # Cancelling alone may fail to end `run`: a task group in which a task fails at that moment swallows it.
        self._is_closed = False
        # Set when there may be something to schedule.
        self._work = asyncio.Event()

    # The gateways.

    def attach(self, gateway_id: str) -> Attachment:
        """Takes a gateway in and tells it how things are."""
        self._num_attached += 1
        attachment = Attachment(f"{gateway_id}#{self._num_attached}")
        self._attachments[attachment.owner] = attachment
        attachment.tell(facts=self._facts, readiness=self.readiness)
        log.info("gateway attached", gateway=attachment.owner)
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """Lets a gateway go and aborts its requests. Idempotent."""
        if self._attachments.pop(attachment.owner, None) is None:
            return
        num_aborted = self._scheduler.abort_owner(attachment.owner) if self._scheduler else 0
        self._work.set()
        log.info("gateway detached", gateway=attachment.owner, num_aborted=num_aborted)

    def add(self, attachment: Attachment, spec: GroupSpec) -> None:
        """Queues a request, or tells its gateway why not."""
        try:
            first_sequence_id = self._admit(spec)
        except BlockyardError as error:
            if error.reason is Reason.REQUEST_ID_CONFLICT:
                attachment.conflicts.add(spec.request_id)
            self.refuse(attachment, spec.request_id, error)
            return
        attachment.conflicts.discard(spec.request_id)
        attachment.accept(spec.request_id, first_sequence_id)
        log.debug(
            "request queued",
            request_id=spec.request_id,
            first_sequence_id=first_sequence_id,
            n=spec.n,
            num_prompt_tokens=len(spec.prompt_token_ids),
        )
        self._work.set()

    def _admit(self, spec: GroupSpec) -> int:
        if self._scheduler is None:
            raise _no_ready_worker(self.readiness.message)
        try:
            return self._scheduler.add(spec, self._clock())
        except NeverFits as error:
            raise BlockyardError(Reason.NEVER_FITS, str(error)) from None
        except DuplicateRequest:
            message = f"request {spec.request_id} runs already"
            raise BlockyardError(Reason.REQUEST_ID_CONFLICT, message) from None
        except ValueError as error:
            raise BlockyardError(Reason.FIELD_INVALID, str(error)) from None

    def refuse(self, attachment: Attachment, request_id: str, error: BlockyardError) -> None:
        """Tells a gateway that a request will not run."""
        log.debug("request refused", request_id=request_id, reason=error.reason)
        attachment.fail(request_id, error)

    def abort(self, attachment: Attachment, abort: Abort) -> None:
        """Ends a gateway's request or one of its sequences; an unknown one is no error."""
        if abort.request_id in attachment.conflicts:
            attachment.conflicts.discard(abort.request_id)
            return
        if self._scheduler and self._scheduler.abort(abort.request_id, abort.sequence_index, abort.reason):
            log.debug("request aborted", request_id=abort.request_id, sequence_index=abort.sequence_index)
            self._work.set()

    # Readiness.

    @property
    def is_ready(self) -> bool:
        """Whether a replica takes steps."""
        return self.readiness.ready

    @property
    def num_gateways(self) -> int:
        """Gateways that are attached."""
        return len(self._attachments)

    def stats(self) -> SchedulerStats | None:
        """The core's counts; None before the replica was first set up."""
        return self._scheduler.stats() if self._scheduler else None

    def _not_ready(self, message: str) -> None:
        self._tell(Readiness(False, message))

    def _tell(self, readiness: Readiness, facts: ModelFacts | None = None) -> None:
        changed = facts if facts != self._facts else None
        self.readiness, self._facts = readiness, facts or self._facts
        for attachment in self._attachments.values():
            attachment.tell(facts=changed, readiness=readiness)

    # The loop.

    async def run(self) -> None:
        """Sets the replica up, serves until its epoch breaks, and begins again unless it was closed."""
        while not self._is_closed:
            facts, cache = await self._set_up()
            self._prepare(cache)
            self._tell_recovered(facts)
            steps = self.replica.open_steps()
            self._tell(Readiness(True), facts)
            log.info("ready", epoch=steps.epoch, max_model_len=facts.max_model_len)
            num_steps = self.step_log.num_steps
            try:
                await self._serve(steps)
            except* BlockyardError as errors:
                self._lose(_cause(errors), steps.epoch)
            finally:
                steps.cancel()
            if self.step_log.num_steps == num_steps:
                await asyncio.sleep(BROKEN_EPOCH_SECONDS)

    async def _set_up(self) -> tuple[ModelFacts, CacheInfo]:
        """Waits for a worker that is set up, and fails the requests that have waited too long for it."""
        expiring = asyncio.create_task(self._expire())
        try:
            return await self.replica.set_up()
        finally:
            expiring.cancel()
            await asyncio.wait({expiring})
            if not expiring.cancelled():
                expiring.result()

    async def _expire(self) -> None:
        patience = self._configuration.service.max_worker_wait_seconds
        while True:
            lost_at = self._clock() if self._lost_at is None else self._lost_at
            arrivals = self._scheduler.arrivals() if self._scheduler else {}
            due = {request_id: max(arrived, lost_at) + patience for request_id, arrived in arrivals.items()}
            now = self._clock()
            if overdue := [request_id for request_id, at in due.items() if at <= now]:
                log.warning("requests waited too long for a worker", num_requests=len(overdue), seconds=patience)
                message = f"no worker was ready for {patience:g} s: {self.readiness.message}"
                self._fail(overdue, message, Reason.NO_READY_WORKER)
            # One that comes later waits at least as long as one that comes now.
            await asyncio.sleep(min([at for at in due.values() if at > now], default=now + patience) - now + 1e-3)

    def _fail(self, request_ids: list[str], message: str, reason: Reason) -> None:
        assert self._scheduler is not None
        self._publish(self._scheduler.fail(request_ids, message), reason)

    async def _serve(self, steps: StepStream) -> None:
        """Runs one epoch until its stream breaks: an ExceptionGroup with a BlockyardError."""
        self._in_flight.begin_epoch()
        self._work.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._in_flight.watch())
            group.create_task(self._send_steps(steps))
            group.create_task(self._receive_answers(steps))

    async def _send_steps(self, steps: StepStream) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while output := self._schedule(steps.epoch):
                await steps.send(output)

    async def _receive_answers(self, steps: StepStream) -> None:
        while True:
            updates = self._process(await steps.receive())
            self._pace.answered(steps.step_seconds)
            # Before the gateways: the worker's next step is what must not be late.
            self._work.set()
            self._publish(updates)
            self._tell_totals()

    def _schedule(self, epoch: int) -> SchedulerOutput | None:
        assert self._scheduler is not None
        if len(self._in_flight) >= self._pace.depth or not self._scheduler.can_schedule():
            return None
        begin = time.perf_counter()
        output = self._scheduler.schedule(self._clock())
        if output is None and not self._in_flight and self._scheduler.can_schedule():
            # No answer will come that could change anything. Asked again, the core makes room by force.
            log.error("nothing could be scheduled: a bug", epoch=epoch, after_step_id=self.last_step_id)
            output = self._scheduler.schedule(self._clock())
        if output:
            self._in_flight.sent(output)
            self.step_log.scheduled(output, epoch, time.perf_counter() - begin)
        return output

    def _process(self, result: StepResult) -> dict[str, OwnerUpdate]:
        assert self._scheduler is not None
        begin = time.perf_counter()
        try:
            updates = self._scheduler.update(result)
        except StepMismatch as error:
            raise BlockyardError(Reason.BUG, str(error)) from None
        self.step_log.answered(result, time.perf_counter() - begin)
        self._in_flight.answered()
        self._lost_at = None
        self.last_step_id = result.step_id
        return updates

    def _publish(self, updates: dict[str, OwnerUpdate], reason: Reason = Reason.BUG) -> None:
        for owner, update in updates.items():
            if attachment := self._attachments.get(owner):
                attachment.publish(update)
                for request_id, message in update.failed:
                    retry = RETRY_AFTER_SECONDS if reason is Reason.NO_READY_WORKER else None
                    attachment.fail(request_id, BlockyardError(reason, message, retry_after_seconds=retry))

    def _tell_totals(self) -> None:
        now = self._clock()
        if self._scheduler and self.step_log.is_due(now):
            self.step_log.tell(self._scheduler.stats(), now)

    # Epochs.

    def _prepare(self, cache: CacheInfo) -> None:
        """Makes a scheduler for these pools; one that has them already goes on."""
        wanted = _scheduler_config(self._configuration, cache)
        if self._scheduler is not None and self._scheduler.config == wanted:
            return
        predecessor, self._scheduler = self._scheduler, Scheduler(wanted)
        if predecessor is not None:
            log.warning("the worker has other pools", num_device_blocks=cache.num_device_blocks)
            self._publish(self._scheduler.take_over(predecessor), Reason.NEVER_FITS)

    def _lose(self, error: BlockyardError, epoch: int) -> None:
        """Takes back what the worker had: its step stream is gone, and with it all KV."""
        assert self._scheduler is not None
        if self._lost_at is None:
            self._lost_at = self._clock()
        self._fail_hopeless(error)
        self._fail_poison(error)
        self._in_flight.begin_epoch()
        self._lost = self._scheduler.recover(self._deaths.suspects)
        self._cause = "the worker was lost" if error.reason in _BREAKS else "a step was refused"
        lost = [num_tokens for update in self._lost.values() for _, num_tokens in update.recovered]
        worker = self.replica.worker
        log.warning(
            "the worker was lost",
            epoch=epoch,
            incarnation=worker.incarnation if worker else "",
            reason=error.message,
            num_requests=len(lost),
            num_tokens=sum(lost),
        )
        self._tell(Readiness(False, f"the worker was lost: {error.message}"))

    def _tell_recovered(self, facts: ModelFacts) -> None:
        """Tells the gateways which of their requests go on, and whether as they would have."""
        lost, self._lost = self._lost, {}
        exact = facts.batch_invariant and _repeats(self._facts, facts)
        for owner, update in lost.items():
            if attachment := self._attachments.get(owner):
                recoveries = [Recovery(request_id, self._cause, count, exact) for request_id, count in update.recovered]
                attachment.recover(recoveries)

    def _fail_hopeless(self, error: BlockyardError) -> None:
        """Fails the requests that would have every epoch broken."""
        step = self._in_flight.oldest
        if error.reason in _BREAKS or step is None:
            return
        assert self._scheduler is not None
        num_outputs = self._scheduler.count_outputs(named_sequences(step, error))
        hopeless = self._refusals.note(error.message, num_outputs, self._scheduler.arrivals())
        if hopeless:
            log.error("requests have a step refused again and again", reason=error.message, request_ids=hopeless)
            self._fail(hopeless, f"the worker refuses its steps: {error.message}", Reason.BUG)

    def _fail_poison(self, error: BlockyardError) -> None:
        """Counts a death against the requests in hand, and fails those that were there three times in a row."""
        assert self._scheduler is not None
        if error.reason is Reason.DRAINING:
            return
        in_hand = self._scheduler.count_outputs(self._in_flight.sequence_ids)
        self._deaths.note(in_hand, self._scheduler.arrivals())
        if poison := self._deaths.poison:
            log.error("requests kill workers", request_ids=poison)
            message = "the worker died three times in a row while it computed this request"
            self._fail(poison, message, Reason.POISON_REQUEST)

    def close(self) -> None:
        """Ends every gateway's stream with DRAINING, begins no further epoch, and writes the totals."""
        self._is_closed = True
        for attachment in self._attachments.values():
            attachment.close(BlockyardError(Reason.DRAINING, "the scheduler is stopping", retry_after_seconds=1.0))
        if self._scheduler:
            self.step_log.tell(self._scheduler.stats(), self._clock())


def _cause(errors: BaseExceptionGroup[BlockyardError]) -> BlockyardError:
    """What broke an epoch: if both directions noticed, the one that says more than that."""
    causes = [error for error in errors.exceptions if isinstance(error, BlockyardError)]
    return next((error for error in causes if error.reason not in _BREAKS), causes[0])


def _repeats(before: ModelFacts | None, after: ModelFacts) -> bool:
    """Whether two replicas give equal results, if they are batch-invariant."""
    return before is not None and (before.determinism_id, before.batch_invariant) == (
        after.determinism_id,
        after.batch_invariant,
    )


def _no_ready_worker(message: str) -> BlockyardError:
    return BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=RETRY_AFTER_SECONDS)


def _scheduler_config(configuration: SchedulerConfiguration, cache: CacheInfo) -> SchedulerConfig:
    settings = configuration.scheduler
    return SchedulerConfig(
        block_size=cache.block_size,
        num_device_blocks=cache.num_device_blocks,
        num_host_blocks=cache.num_host_blocks,
        max_model_len=cache.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_prefill_chunk=settings.max_prefill_chunk,
        enable_prefix_caching=configuration.cache.enable_prefix_caching,
        preemption_mode=settings.preemption_mode,
        max_steps_in_flight=MAX_STEPS_IN_FLIGHT,
        debug_integrity=configuration.service.debug_integrity,
    )
