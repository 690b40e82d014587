"""Admits requests: attaches gateways, checks limits, keeps deadlines, finds requests that are asked for again.

Decides what is let in. Where a request runs is the dispatcher's business.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from blockyard.contract.models import Task
from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import Abort, AbortReason, Ending, ModelFacts, Resumed, TokenUpdate
from blockyard.errors import BlockyardError, Reason
from blockyard.retention import Retention
from blockyard.telemetry import EventLogger
from scheduler_service.core.config import CoreConfig, NeverFits
from scheduler_service.core.queues.deadlines import DeadlineKind, Deadlines
from scheduler_service.core.queues.overload import MAX_RETRY_SECONDS, Limit
from scheduler_service.core.sequence import Group
from scheduler_service.gateways.codec import Addition, check_addition
from scheduler_service.gateways.outbox import GatewayOutbox
from scheduler_service.requests.placement import are_asleep
from scheduler_service.requests.reattachment import Reattachment
from scheduler_service.requests.registry import Request, RequestRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.core.queues.backlog import Backlog
    from scheduler_service.core.values import GroupSpec
    from scheduler_service.metrics import SchedulerMetrics
    from scheduler_service.requests.dispatcher import Dispatcher

log = EventLogger(__name__)

RETRY_AFTER_SECONDS = 1.0
# How often tenants are charged for the tokens of their running requests while requests wait.
CHARGE_SECONDS = 0.1
MAX_SLEEP_SECONDS = 1.0
MAX_PROMISES = 100_000
_OVERLOADS = {
    Limit.QUEUE_FULL: (Reason.QUEUE_FULL, "too many requests wait (--max-waiting-requests): try again"),
    Limit.TOKEN_BACKLOG: (
        Reason.TOKEN_BACKLOG,
        "the requests that wait hold too many tokens (--max-waiting-tokens): try again",
    ),
    Limit.TENANT_QUOTA: (
        Reason.TENANT_QUOTA,
        "too many requests of this tenant wait (--max-tenant-requests): try again",
    ),
}


class Admission:
    """Serves the gateways. One object for the scheduler's process."""

    def __init__(
        self,
        configuration: SchedulerConfiguration,
        requests: RequestRegistry,
        backlog: Backlog,
        dispatcher: Dispatcher,
        metrics: SchedulerMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._patience = configuration.service.max_worker_wait_seconds
        self._waits_while_asleep = configuration.service.wait_while_asleep
        self._requests = requests
        self._backlog = backlog
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        window_seconds = configuration.resume.resume_window_seconds
        self._reattachment = Reattachment(configuration.service.reattach_seconds, window_seconds)
        dispatcher.on_first_facts = lambda: self._reattachment.begin(clock())
        self._deadlines = Deadlines()
        requests.on_end = self._deadlines.cancel
        # Requests that were refused with a time after which to come again.
        self._promised = Retention[str, bool](
            max_age_seconds=2 * MAX_RETRY_SECONDS, max_entries=MAX_PROMISES, max_weight=MAX_PROMISES
        )
        self._num_attached, self._next_sequence_id = 0, 1
        # Set when a deadline may be earlier than the ones before.
        self._alarm = asyncio.Event()

    # Gateways.

    def attach(self, gateway_id: str) -> GatewayOutbox:
        """Attaches a gateway, and sends it facts and readiness. Ends the stream that it had before."""
        for former in [each for each in self._requests.outboxes if each.gateway_id == gateway_id]:
            former.close(BlockyardError(Reason.CLIENT_CANCELLED, "this gateway has attached again, on another stream"))
            self.detach(former)
        self._num_attached += 1
        outbox = GatewayOutbox(f"{gateway_id}#{self._num_attached}", gateway_id, self._clock)
        self._requests.add_gateway(outbox)
        outbox.put_state(facts=self._dispatcher.facts, readiness=self._dispatcher.readiness)
        log.info("gateway attached", gateway=outbox.owner)
        return outbox

    def detach(self, outbox: GatewayOutbox) -> None:
        """Detaches a gateway; the requests that it read run on for a while. Idempotent."""
        if outbox not in self._requests.outboxes:
            return
        num_orphans = self._requests.remove_gateway(outbox, self._clock())
        self._alarm.set()
        log.info("gateway detached", gateway=outbox.owner, num_orphans=num_orphans)

    def close(self) -> None:
        for outbox in self._requests.outboxes:
            outbox.close(BlockyardError(Reason.DRAINING, "the scheduler is stopping", retry_after_seconds=1.0))

    # Requests.

    def add(self, outbox: GatewayOutbox, addition: Addition) -> None:
        """Queues a request, lets its gateway read the one that exists under this name, or refuses it."""
        spec = addition.spec
        try:
            if existing := self._requests.find(spec.request_id, self._clock()):
                if not addition.digest or existing.digest != addition.digest:
                    raise BlockyardError(
                        Reason.REQUEST_ID_CONFLICT,
                        f"request_id {spec.request_id} belongs to another request: choose another id",
                    )
                self._send_all(existing, outbox, addition.handle)
                return
            request = self._admit(addition)
        except BlockyardError as error:
            self.refuse(outbox, spec.request_id, addition.handle, error)
            return
        outbox.put_accepted(spec.request_id, request.group.sequences[0].sequence_id, addition.handle)
        self._requests.add(request)
        self._requests.add_reader(request, outbox, addition.handle)
        if request.group.is_finished:
            self._requests.end([request.group], self._clock())
            return
        self._set_deadlines(request, addition)
        if not self._backlog:
            # Tokens that a tenant got from an idle machine are not charged.
            self._note_outputs()
        self._dispatcher.submit(request)
        log.debug(
            "request queued",
            request_id=spec.request_id,
            first_sequence_id=request.group.sequences[0].sequence_id,
            n=spec.n,
            num_prompt_tokens=len(spec.prompt_token_ids),
            num_output_tokens=request.group.num_outputs,
        )

    def _admit(self, addition: Addition) -> Request:
        config = self._pools()
        spec, before = addition.spec, addition.resubmission
        facts = self._dispatcher.facts
        _check_task(facts, spec)
        if facts is not None:
            check_addition(addition, facts.vocab_size)
        try:
            max_length = config.fit(spec)
        except NeverFits as error:
            raise BlockyardError(Reason.NEVER_FITS, str(error)) from None
        except ValueError as error:
            raise BlockyardError(Reason.FIELD_INVALID, str(error)) from None
        if before is None:
            _check_deadlines(addition)
            if are_asleep(self._dispatcher.engines) and not self._waits_while_asleep:
                raise _make_asleep_error()
            self._check_limits(spec)
        now = self._clock()
        arrived_at = now - (before.age_seconds if before else 0.0)
        has_ended = before is not None and all(record.reason for record in before.sequences)
        if before is not None and not has_ended and (error := self._requests.find_error(spec.request_id, now)):
            # The gateway was away when the request failed.
            raise error.with_traceback(None)
        sent_at = arrived_at - addition.age_seconds
        if not has_ended and self._reattachment.was_cancelled(spec.request_id, sent_at, now):
            raise _make_cancelled_error()
        group = Group(spec, self._next_sequence_id, max_length, arrived_at)
        self._next_sequence_id += spec.num_sequence_ids
        if before is not None:
            group.continue_from(before.sequences, before.num_cached_tokens)
            self._metrics.on_taken_over(group)
        return Request(group, addition, self._dispatcher.weights_version)

    def _check_limits(self, spec: GroupSpec) -> None:
        """Raises an error with a Retry-After. A request that comes again then finds a place kept for it."""
        now, drain_rate = self._clock(), self._dispatcher.drain_rate
        comes_again = self._promised.pop(spec.request_id) is not None
        overload = self._backlog.check(spec, leaves_room=drain_rate.has_promised(now) and not comes_again)
        if overload is None:
            return
        reason, message = _OVERLOADS[overload.limit]
        self._promised.add(spec.request_id, True, 1, now)
        retry = drain_rate.retry_after_seconds(overload, now)
        raise BlockyardError(reason, message, retry_after_seconds=retry)

    def _pools(self) -> CoreConfig:
        """Returns the configuration of the largest replica; raises NO_READY_WORKER while none was ever set up."""
        configs = [each.scheduler.config for each in self._dispatcher.engines if each.scheduler is not None]
        if not configs:
            message = self._dispatcher.readiness.message
            raise BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=RETRY_AFTER_SECONDS)
        return max(configs, key=lambda config: config.max_tokens)

    def _set_deadlines(self, request: Request, addition: Addition) -> None:
        if addition.max_queue_seconds is not None:
            at = request.group.arrived_at + addition.max_queue_seconds
            self._deadlines.add(request.request_id, DeadlineKind.QUEUE, at)
            self._alarm.set()
        if addition.remaining_seconds is not None:
            at = self._clock() + addition.remaining_seconds
            self._deadlines.add(request.request_id, DeadlineKind.GENERATION, at)
            self._alarm.set()

    def resume(self, outbox: GatewayOutbox, request_id: str, handle: int) -> None:
        """Lets a gateway read a request from its beginning, or reports why it cannot."""
        now = self._clock()
        try:
            if (request := self._requests.find(request_id, now)) is None:
                error = self._requests.find_error(request_id, now)
                raise (error or self._reattachment.make_unknown_error(request_id, now)).with_traceback(None)
            self._send_all(request, outbox, handle)
        except BlockyardError as error:
            self.refuse(outbox, request_id, handle, error)

    def _send_all(self, request: Request, outbox: GatewayOutbox, handle: int) -> None:
        outbox.put_resumed(_make_resumed(handle, request))
        if request.request_id in self._requests.live:
            self._requests.add_reader(request, outbox, handle)
        log.debug("request resumed", request_id=request.request_id, gateway=outbox.owner)

    def refuse(self, outbox: GatewayOutbox, request_id: str, handle: int, error: BlockyardError) -> None:
        log.debug("request refused", request_id=request_id, reason=error.reason)
        self._metrics.on_refused(error.reason)
        outbox.put_failed(request_id, error, handle)

    def abort(self, outbox: GatewayOutbox, abort: Abort) -> None:
        """Ends a gateway's request or one of its sequences; an unknown one is no error."""
        request = self._requests.find_read(outbox, abort.request_id, abort.handle)
        if request is None:
            return
        is_whole = abort.reason is AbortReason.CLIENT and abort.sequence_index is None
        if is_whole and not self._requests.remove_reader(request, outbox):
            return
        running = [sequence for sequence in request.group.sequences if sequence.finish_reason is None]
        others = [reader for reader in request.handles if reader is not outbox]
        reason, num_tokens = FinishReason.ABORT, None
        if abort.reason is AbortReason.STOP_STRING:
            reason, num_tokens = FinishReason.STOP, abort.num_tokens
        if self._dispatcher.abort(request, abort.sequence_index, reason, num_tokens):
            log.debug("request aborted", request_id=abort.request_id, sequence_index=abort.sequence_index)
            ended = [each for each in running if each.finish_reason is not None]
            update = TokenUpdate(ended=[Ending(each.sequence_id, reason) for each in ended])
            for reader in others:
                reader.put_update(update)

    def cancel(self, request_ids: Iterable[str]) -> tuple[list[str], list[str]]:
        """Ends requests, whoever reads them. Returns the live ones, and unknown ones that will end if they arrive."""
        now, names = self._clock(), list(dict.fromkeys(request_ids))
        found = [request for name in names if (request := self._requests.live.get(name))]
        for request in found:
            self._dispatcher.fail(request, _make_cancelled_error())
            self._reattachment.note(request.request_id, now)
        cancelled = [request.request_id for request in found]
        unknown = [name for name in names if name not in cancelled and self._requests.find(name, now) is None]
        return cancelled, self._reattachment.cancel(unknown, now)

    def take_over_cancellations(self, cancelled: Iterable[tuple[str, float]]) -> None:
        """Ends requests that a gateway saw cancelled, given with the seconds since then, or keeps the cancellations.

        This scheduler may not have heard of them. Requests that are newer go on.
        """
        now = self._clock()
        for request_id, age_seconds in cancelled:
            self._reattachment.note(request_id, now - age_seconds)
            request = self._requests.live.get(request_id)
            if request is not None and self._reattachment.was_cancelled(request_id, request.group.arrived_at, now):
                self._dispatcher.fail(request, _make_cancelled_error())

    # Time.

    async def keep_time(self) -> None:
        """Ends requests that have waited or run too long. Runs for ever."""
        while True:
            now = self._clock()
            self._expire(now)
            self._charge()
            self._alarm.clear()
            try:
                async with asyncio.timeout(max(self._next_due() - self._clock(), 0.0) + 1e-3):
                    await self._alarm.wait()
            except TimeoutError:
                pass

    def _next_due(self) -> float:
        charging = CHARGE_SECONDS if self._backlog else MAX_SLEEP_SECONDS
        due = (self._deadlines.next_due(), self._requests.next_due(), self._clock() + charging)
        return min(at for at in due if at is not None)

    def _expire(self, now: float) -> None:
        for request_id, kind in self._deadlines.take_expired(now):
            request = self._requests.live.get(request_id)
            if request is not None and not (kind is DeadlineKind.QUEUE and request.has_begun):
                self._dispatcher.fail(request, _make_overdue_error(kind))
        for request in self._requests.take_abandoned(now):
            log.info("request abandoned", request_id=request.request_id)
            self._dispatcher.abort(request)
        self._expire_without_worker(now)

    def _expire_without_worker(self, now: float) -> None:
        """Fails the requests that have waited too long for a worker."""
        dispatcher, patience, live = self._dispatcher, self._patience, self._requests.live.values()
        if are_asleep(dispatcher.engines):
            dispatcher.lost_at = now  # Requests wait for an operator; their wait for a worker begins afterwards.
            return
        if dispatcher.ready_engines:
            return
        lost_at = now if dispatcher.lost_at is None else dispatcher.lost_at
        overdue = [each for each in live if max(each.group.arrived_at, lost_at) + patience <= now]
        if overdue:
            log.warning("requests waited too long for a worker", num_requests=len(overdue), seconds=patience)
        for request in overdue:
            dispatcher.fail(request, _make_lost_error(patience, dispatcher.readiness.message))

    def _charge(self) -> None:
        """Charges each tenant for the tokens of its requests since the last time, while requests wait."""
        if self._backlog:
            for (tenant, lora_id), num_tokens in self._note_outputs().items():
                self._backlog.charge(tenant, lora_id, num_tokens)

    def _note_outputs(self) -> Counter[tuple[str, int]]:
        """Returns the new tokens of live requests since the last time, by tenant and adapter."""
        got = Counter[tuple[str, int]]()
        for request in self._requests.live.values():
            num_outputs, spec = request.group.num_outputs, request.group.spec
            got[spec.tenant, spec.lora_id] += num_outputs - request.num_charged
            request.num_charged = num_outputs
        return got


def _check_deadlines(addition: Addition) -> None:
    """Raises GENERATION_DEADLINE or QUEUE_DEADLINE for a request whose deadline has passed on arrival."""
    if addition.remaining_seconds is not None and addition.remaining_seconds <= 0:
        raise _make_overdue_error(DeadlineKind.GENERATION)
    if addition.max_queue_seconds is not None and addition.max_queue_seconds <= 0:
        raise _make_overdue_error(DeadlineKind.QUEUE)


def _check_task(facts: ModelFacts | None, spec: GroupSpec) -> None:
    """Raises FEATURE_DISABLED for generation from a pooling model, and for pooling of another model."""
    task = facts.task if facts else Task.UNSPECIFIED
    if task.pools != (spec.pooling is not None):
        raise BlockyardError(Reason.FEATURE_DISABLED, f"the model is served for another task, {task.value} (--task)")


def _make_resumed(handle: int, request: Request) -> Resumed:
    group = request.group
    return Resumed(
        handle=handle,
        submission=request.submission,
        first_sequence_id=group.sequences[0].sequence_id,
        sequences=[sequence.make_record() for sequence in group.sequences],
        num_cached_tokens=group.num_cached_tokens,
        prompt_logprobs=group.prompt_logprobs.copy(),
    )


def _make_lost_error(patience: float, missing: str) -> BlockyardError:
    message = f"no worker was ready for {patience:g} s: {missing}"
    return BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=RETRY_AFTER_SECONDS)


def _make_asleep_error() -> BlockyardError:
    message = "all replicas are asleep: an operator wakes them (blockyard admin wake)"
    return BlockyardError(Reason.SLEEPING, message, retry_after_seconds=RETRY_AFTER_SECONDS)


def _make_cancelled_error() -> BlockyardError:
    return BlockyardError(Reason.CLIENT_CANCELLED, "the request was cancelled")


def _make_overdue_error(kind: DeadlineKind) -> BlockyardError:
    if kind is DeadlineKind.QUEUE:
        return BlockyardError(
            Reason.QUEUE_DEADLINE, "the request waited longer than max_queue_time", retry_after_seconds=1.0
        )
    return BlockyardError(Reason.GENERATION_DEADLINE, "the call's deadline has passed")
