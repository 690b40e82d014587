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
from scheduler_service.facts import Readiness
from scheduler_service.pace import MAX_STEPS_IN_FLIGHT, Pace
from scheduler_service.replica import Replica
from scheduler_service.step_log import StepLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.codec import Abort
    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.core.output import GroupSpec, OwnerUpdate, SchedulerOutput, SchedulerStats, StepResult
    from scheduler_service.facts import CacheInfo, ModelFacts
    from scheduler_service.worker_link import StepStream, WorkerLink

log = EventLogger(__name__)

RETRY_AFTER_SECONDS = 1.0
# An epoch that broke before it answered anything may break again at once.
BROKEN_EPOCH_SECONDS = 0.5


class Engine:
    """Serves the attached gateways from one replica, for ever."""

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
        self._num_in_flight = 0
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
        if self._scheduler is None or not self.readiness.ready:
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
            facts, cache = await self.replica.set_up()
            self._prepare(cache)
            steps = self.replica.open_steps()
            self._tell(Readiness(True), facts)
            log.info("ready", epoch=steps.epoch, max_model_len=facts.max_model_len)
            num_steps = self.step_log.num_steps
            try:
                await self._serve(steps)
            except* BlockyardError as errors:
                self._lose(_first_message(errors), steps.epoch)
            finally:
                steps.cancel()
            if self.step_log.num_steps == num_steps:
                await asyncio.sleep(BROKEN_EPOCH_SECONDS)

    async def _serve(self, steps: StepStream) -> None:
        """Runs one epoch until its stream breaks: an ExceptionGroup with a BlockyardError."""
        self._num_in_flight = 0
        self._work.set()
        async with asyncio.TaskGroup() as group:
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
        if self._num_in_flight >= self._pace.depth or not self._scheduler.can_schedule():
            return None
        begin = time.perf_counter()
        output = self._scheduler.schedule(self._clock())
        if output is None and not self._num_in_flight and self._scheduler.can_schedule():
            # No answer will come that could change anything. Asked again, the core makes room by force.
            log.error("nothing could be scheduled: a bug", epoch=epoch, after_step_id=self.last_step_id)
            output = self._scheduler.schedule(self._clock())
        if output:
            self._num_in_flight += 1
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
        self._num_in_flight -= 1
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
        """Makes a scheduler for these pools; one that has them already goes on, empty."""
        wanted = _scheduler_config(self._configuration, cache)
        if self._scheduler is None or self._scheduler.config != wanted:
            self._scheduler = Scheduler(wanted)

    def _lose(self, why: str, epoch: int) -> None:
        """Fails every request: the worker's step stream is gone, and with it all KV."""
        assert self._scheduler is not None
        message = f"the worker was lost: {why}"
        log.error("epoch broken", epoch=epoch, reason=why)
        self._publish(self._scheduler.fail_all(message), Reason.NO_READY_WORKER)
        self._tell(Readiness(False, message))
        for attachment in self._attachments.values():
            attachment.seal()

    def close(self) -> None:
        """Ends every gateway's stream with DRAINING, begins no further epoch, and writes the totals."""
        self._is_closed = True
        for attachment in self._attachments.values():
            attachment.close(BlockyardError(Reason.DRAINING, "the scheduler is stopping", retry_after_seconds=1.0))
        if self._scheduler:
            self.step_log.tell(self._scheduler.stats(), self._clock())


def _first_message(errors: BaseExceptionGroup[BlockyardError]) -> str:
    """What broke an epoch: if both directions noticed, the first to."""
    first = errors.exceptions[0]
    return first.message if isinstance(first, BlockyardError) else str(first)


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
