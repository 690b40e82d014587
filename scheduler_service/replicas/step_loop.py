"""One replica's step loop: schedule, send, process, publish. The next step is sent before the last one is answered.

Knows one epoch at a time, and no gateway: results go to its `StepEvents`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.telemetry import EventLogger
from scheduler_service.core.scheduler import Scheduler, StepMismatch
from scheduler_service.replicas.epoch_failure import DRAINED
from scheduler_service.replicas.steps.answer_checks import WrongAnswer
from scheduler_service.replicas.steps.step_metrics import StepLog, StepMeter
from scheduler_service.replicas.steps.steps_in_flight import PipelineDepth, StepDeadline, StepsInFlight

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence

    from scheduler_service.core.sequence import Group
    from scheduler_service.core.values import OwnerUpdate, SchedulerOutput, StepResult
    from scheduler_service.replicas.circuit_breaker import CircuitBreaker
    from scheduler_service.replicas.drain import Drain
    from scheduler_service.replicas.worker_link import Steps

log = EventLogger(__name__)


class StepEvents(Protocol):
    """What the loop reports. Called on the event loop; must not block."""

    def dispatch(self) -> None:
        """Gives ready replicas the requests that they have room for."""

    def on_step_scheduled(self, replica_id: int, output: SchedulerOutput) -> None:
        """A step is about to be sent."""

    def publish(self, updates: Mapping[str, OwnerUpdate]) -> None: ...

    def on_requests_ended(self, groups: Iterable[Group]) -> None: ...


class StepLoop:
    """Runs the steps of one epoch after another. `serves_without`: whether another replica takes requests."""

    def __init__(
        self,
        replica_id: int,
        events: StepEvents,
        breaker: CircuitBreaker,
        drain: Drain,
        meter: StepMeter,
        deadline: StepDeadline,
        pipeline: PipelineDepth,
        serves_without: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self.meter = meter
        self.step_log = StepLog()
        self.in_flight = StepsInFlight(deadline, clock)
        self.last_step_id = 0
        self._replica_id = replica_id
        self._events = events
        self._breaker = breaker
        self._drain = drain
        self._serves_without = serves_without
        self._clock = clock
        self._pipeline = pipeline
        # Set when there may be something to schedule.
        self._work = asyncio.Event()
        self._is_sending = False

    def wake(self) -> None:
        self._work.set()

    def on_epoch_broken(self) -> None:
        """Drops the steps in flight: no answer to them will come."""
        self.in_flight.begin_epoch()
        self.meter.on_lost(self._clock())

    async def run(self, scheduler: Scheduler, steps: Steps, beside: Sequence[Coroutine[Any, Any, None]] = ()) -> None:
        """Runs one epoch until its stream breaks: an ExceptionGroup with a BlockyardError.

        `beside`: other tasks of the epoch; if one of them fails, so does the epoch.
        """
        self.in_flight.begin_epoch()
        self._work.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.in_flight.watch())
            group.create_task(self._leave_when_drained(scheduler))
            group.create_task(self._send_steps(scheduler, steps))
            group.create_task(self._receive_answers(scheduler, steps))
            for work in beside:
                group.create_task(work)

    async def _leave_when_drained(self, scheduler: Scheduler) -> None:
        await self._drain.wait_until(lambda: self._may_leave(scheduler))
        raise BlockyardError(Reason.DRAINING, DRAINED)

    def _may_leave(self, scheduler: Scheduler) -> bool:
        """Whether a drain is done: no step is in flight, and no request is left that only this replica could finish."""
        if not self._drain.is_wanted or self.in_flight:
            return False
        return self._leaves_at_once() or not scheduler.has_unfinished()

    def _leaves_at_once(self) -> bool:
        return self._drain.leaves_at_once(serves_without=self._serves_without())

    async def _send_steps(self, scheduler: Scheduler, steps: Steps) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            await self._send_due(scheduler, steps)

    async def _send_due(self, scheduler: Scheduler, steps: Steps) -> None:
        """Sends steps until nothing is left to schedule. Does nothing if another task is sending."""
        if self._is_sending:
            return
        self._is_sending = True
        try:
            while output := self._schedule(scheduler, steps.epoch):
                await steps.send(output)
                self.meter.on_sent(steps.encode_seconds)
        finally:
            self._is_sending = False

    async def _receive_answers(self, scheduler: Scheduler, steps: Steps) -> None:
        while True:
            updates = self._process(scheduler, await steps.receive())
            try:
                self._pipeline.on_answered(steps.step_seconds)
                faults.reach(faults.BEFORE_PUBLISH)
            finally:
                # The scheduler counts these tokens as given out: after an error the next epoch goes on behind them.
                self._publish(scheduler, updates)
            if self._drain.is_wanted:
                self._drain.reconsider()
            # Sent here and not by the other task, since a task switch costs as much as scheduling. The published tokens
            # leave after the step, since the worker's next step must not be late.
            await self._send_due(scheduler, steps)

    def _schedule(self, scheduler: Scheduler, epoch: int) -> SchedulerOutput | None:
        if len(self.in_flight) >= self._pipeline.depth:
            return None
        if self._drain.is_wanted and self._leaves_at_once():
            # The requests go on at another replica, or later, once the steps in flight are answered.
            return None
        self._events.dispatch()
        if not scheduler.can_schedule():
            return None
        begin = self._clock()
        output = scheduler.schedule(begin)
        if output:
            self.in_flight.on_sent(output)
            seconds = self._clock() - begin
            self.step_log.on_scheduled(output, epoch, seconds)
            self.meter.on_scheduled(output.step_id, seconds)
            self._events.on_step_scheduled(self._replica_id, output)
        return output

    def _process(self, scheduler: Scheduler, result: StepResult) -> dict[str, OwnerUpdate]:
        begin = self._clock()
        try:
            updates = scheduler.update(result)
        except StepMismatch as error:
            raise WrongAnswer(str(error)) from None
        seconds = self._clock() - begin
        self.step_log.on_answered(result, seconds)
        self.meter.on_answered(result, seconds, self.in_flight.on_answered())
        self.last_step_id = result.step_id
        self._breaker.on_answered()
        return updates

    def _publish(self, scheduler: Scheduler, updates: dict[str, OwnerUpdate]) -> None:
        self._events.publish(updates)
        self._events.on_requests_ended(scheduler.take_ended())
        now = self._clock()
        if self.step_log.is_due(now):
            self.step_log.write_totals(scheduler.stats(), now)
