"""Gives each request to a replica that has room for it, and takes back what a replica loses.

Owns the backlog, the requests that no replica has. The others belong to their engines. Knows no messages.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.contract.sampling import FinishReason
from blockyard.contract.scheduling import ModelFacts, Readiness, Recovery
from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from scheduler_service import catalogue
from scheduler_service.core.queues.overload import DrainRate
from scheduler_service.core.recovery import Suspects
from scheduler_service.replicas.epoch_failure import EpochFailure, is_break
from scheduler_service.replicas.facts import combine, is_same_model, repeats
from scheduler_service.replicas.steps.answer_checks import WrongAnswer
from scheduler_service.requests.failure_history import Deaths, RecoveryLog, RecoveryRecord, Refusals
from scheduler_service.requests.placement import assign
from scheduler_service.requests.registry import Lost, Request, RequestRegistry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from scheduler_service.core.queues.backlog import Backlog
    from scheduler_service.core.sequence import Group
    from scheduler_service.core.values import OwnerUpdate, SchedulerOutput
    from scheduler_service.metrics import SchedulerMetrics
    from scheduler_service.replicas.engine import Engine

log = EventLogger(__name__)

_DRAINED, _DIED = "the worker was drained", "the worker was lost"
_REFUSED, _ANSWERED_WRONG = "a step was refused", "the worker's answer was wrong"
_OUTDATED = "the weights were updated, and the request asked to fail then"
_LOSSES = {
    _DRAINED: catalogue.DRAINED,
    _DIED: catalogue.DIED,
    _REFUSED: catalogue.STEP_REFUSED,
    _ANSWERED_WRONG: catalogue.ANSWERED_WRONG,
}


class Dispatcher:
    """Handles the engines' events. One object for the scheduler's process."""

    def __init__(
        self, requests: RequestRegistry, backlog: Backlog, metrics: SchedulerMetrics, clock: Callable[[], float]
    ) -> None:
        self.engines: list[Engine] = []
        self.suspects = Suspects()
        self.readiness = Readiness(False, "the scheduler has just started")
        self.facts: ModelFacts | None = None
        # Called once, before the gateways get the first facts.
        self.on_first_facts: Callable[[], None] = lambda: None
        self.recovery_log = RecoveryLog()
        # When the last worker was lost; None once steps are answered again.
        self.lost_at: float | None = None
        self._requests = requests
        self._backlog = backlog
        self._metrics = metrics
        self._clock = clock
        self._missing_workers = ""
        self._deaths, self._refusals = Deaths(), Refusals()
        self.drain_rate = DrainRate(clock())

    # Replicas.

    def add_engine(self, engine: Engine) -> None:
        self.engines.append(engine)
        self.on_readiness_changed(engine)

    def remove_engine(self, engine: Engine) -> None:
        """Removes a replica that has no requests."""
        self.engines.remove(engine)
        self._requests.spans.on_replica_gone(engine.replica_id)
        self.on_readiness_changed(engine)

    @property
    def ready_engines(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.takes_requests]

    @property
    def weights_version(self) -> str:
        """The weights' version that gateways know of."""
        return self.facts.weights_version if self.facts else ""

    def serves_without(self, engine: Engine) -> bool:
        return any(other.takes_requests for other in self.engines if other is not engine)

    def may_claim(self, engine: Engine, incarnation: str) -> bool:
        """Whether a worker is not another replica's: one process may be found by two names."""
        held = (other for other in self.engines if other is not engine and (other.is_ready or other.drain.is_wanted))
        return all(incarnation not in other.replica.incarnations for other in held)

    def may_serve(self, engine: Engine, facts: ModelFacts) -> bool:
        """Whether all other replicas that serve have the same model: gateways know of one."""
        others = (other.facts for other in self.engines if other is not engine and other.is_ready)
        return all(known is None or is_same_model(known, facts) for known in others)

    def on_readiness_changed(self, engine: Engine) -> None:
        """Sends the gateways the facts and the readiness of all replicas together."""
        known = [each.facts for each in self.ready_engines if each.facts]
        facts = combine(known) if known else self.facts
        new_facts = facts if facts != self.facts else None
        if facts is not None and self.facts is None:
            self.on_first_facts()
        self.facts = facts
        self._put_state(engine, new_facts)
        for each in self.engines:
            each.reconsider()
        if engine.takes_requests:
            self.wake()

    def on_workers_missing(self, message: str) -> None:
        """Reports what incomplete replicas lack; an empty message: nothing."""
        self._missing_workers = message
        self._put_state(None, None)

    def _put_state(self, engine: Engine | None, new_facts: ModelFacts | None) -> None:
        self.readiness = _find_readiness(self.engines, engine, self._missing_workers)
        for outbox in self._requests.outboxes:
            outbox.put_state(facts=new_facts, readiness=self.readiness)

    @property
    def suspect_request_ids(self) -> list[str]:
        """Live requests that may have killed workers."""
        return [request_id for request_id in self._deaths.suspects if request_id in self._requests.live]

    # Requests.

    def submit(self, request: Request) -> None:
        self._backlog.push(request.group, request.group.arrived_at)
        self.wake()

    def wake(self) -> None:
        """Wakes the replicas that take requests: there may be something to schedule."""
        for engine in self.ready_engines:
            engine.wake()

    def abort(
        self,
        request: Request,
        sequence_index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
        num_tokens: int | None = None,
    ) -> bool:
        """Ends a request or one of its sequences, wherever it is. Returns whether there was something to end."""
        if request.engine is not None and request.engine.scheduler is not None:
            scheduler = request.engine.scheduler
            has_ended = scheduler.abort(request.request_id, sequence_index, reason, num_tokens)
            self.on_requests_ended(scheduler.take_ended())
            if has_ended:
                request.engine.step_loop.meter.on_cancelled(self._clock())
            request.engine.wake()
            return has_ended
        has_ended = request.group.end_waiting(sequence_index, reason, num_tokens)
        if request.group.is_finished:
            self._backlog.remove(request.group)
            self.on_requests_ended([request.group])
        return has_ended

    def fail(self, request: Request, error: BlockyardError) -> None:
        """Ends a request with an error, and reports it to its readers."""
        for outbox, handle in request.handles.items():
            outbox.put_failed(request.request_id, error, handle)
        self._metrics.on_failed(error.reason)
        self._requests.drop(request)
        self._requests.retain_error(request, error, self._clock())
        self.abort(request, reason=FinishReason.ERROR)

    def fail_all(self, request_ids: Iterable[str], error: BlockyardError) -> None:
        for request_id in request_ids:
            if request := self._requests.live.get(request_id):
                self.fail(request, error)

    # Giving them to replicas.

    def dispatch(self) -> None:
        """Gives replicas the requests that they have room for. The others stay here, and may still go anywhere."""
        if not self._backlog:
            return
        rooms = {each: each.scheduler.find_room() for each in self.ready_engines if each.scheduler is not None}
        chosen: defaultdict[Engine, list[Group]] = defaultdict(list)
        for group, engine in assign(self._backlog, rooms):
            self.drain_rate.note(1, group.prompt_length, self._clock())
            chosen[engine].append(group)
        for engine, groups in chosen.items():
            self._give(engine, groups)

    def _give(self, engine: Engine, groups: list[Group]) -> None:
        assert engine.scheduler is not None
        recoveries: defaultdict[str, list[Recovery]] = defaultdict(list)
        outdated: list[str] = []
        for group in groups:
            request = self._requests.live[group.spec.request_id]
            request.engine = engine
            if _is_outdated(request, engine):
                outdated.append(request.request_id)
            elif request.lost is not None:
                recovery = _make_recovery(request, request.lost, engine)
                recoveries[group.spec.owner].append(recovery)
                request.lost = None
                self._metrics.on_recovered(recovery)
            else:
                self._metrics.on_taken(group, self._clock())
        self._requests.publish_recoveries(recoveries)
        self._requests.publish_weights(groups, engine.facts.weights_version if engine.facts else "")
        updates = engine.scheduler.adopt(groups)
        self._requests.publish(updates)
        for request_id, message in (failed for update in updates.values() for failed in update.failed):
            self.fail_all([request_id], BlockyardError(Reason.NEVER_FITS, message))
        self.fail_all(outdated, BlockyardError(Reason.SLEEPING, _OUTDATED))
        self.on_requests_ended(engine.scheduler.take_ended())
        engine.wake()

    # Answers of replicas.

    def on_step_scheduled(self, replica_id: int, output: SchedulerOutput) -> None:
        self._requests.spans.on_scheduled(replica_id, output)

    def publish(self, updates: Mapping[str, OwnerUpdate]) -> None:
        if self.lost_at is not None:
            log.info("steps are answered again", after_seconds=round(self._clock() - self.lost_at, 3))
            self.lost_at = None
        self._requests.publish(updates)

    def on_requests_ended(self, groups: Iterable[Group]) -> None:
        self._requests.end(groups, self._clock())

    def on_worker_lost(self, engine: Engine, failure: EpochFailure) -> None:
        """Puts a replica's requests back to the front of the backlog; fails those that would break the next epoch."""
        if self.lost_at is None:
            self.lost_at = self._clock()
        cause = _cause(failure.error)
        self._metrics.on_worker_lost(_LOSSES[cause])
        groups: list[Group] = []
        for group, num_tokens in failure.evacuated:
            request = self._requests.live.get(group.spec.request_id)
            if request is None:
                continue
            request.engine = None
            if num_tokens:
                request.lost = Lost(cause, num_tokens, failure.facts)
                self._requests.spans.on_lost(group, cause, num_tokens)
                self.recovery_log.num_replayed_tokens += num_tokens
            groups.append(group)
        if groups or failure.error.reason is not Reason.DRAINING:
            self.recovery_log.add(_make_record(engine, cause, failure, self._clock()))
        if isinstance(failure.error, WrongAnswer):
            # Retry the requests of the failed step last: if others succeed first, the worker is not the cause.
            groups.sort(key=lambda group: group.spec.request_id in failure.in_hand)
        self._backlog.push_front(groups)
        self._fail_stranded(engine)
        self._fail_hopeless(failure)
        self._fail_poison(failure)
        self.suspects.replace(self._requests.live[request_id].group for request_id in self.suspect_request_ids)
        # Ready replicas go on with these requests at once.
        self.wake()

    def _fail_stranded(self, engine: Engine) -> None:
        """Fails the requests that the replica had and could not give back."""
        stranded = self._requests.find_of(engine)
        if stranded:
            log.error("requests cannot go on", replica_id=engine.replica_id, request_ids=stranded)
            self.fail_all(stranded, BlockyardError(Reason.BUG, "the scheduler lost its state of the request"))

    def _fail_hopeless(self, failure: EpochFailure) -> None:
        """Fails the requests whose steps are refused again and again."""
        message = failure.error.message
        if failure.refused and (hopeless := self._refusals.note(message, failure.refused, self._requests.live)):
            log.error("requests have a step refused again and again", reason=message, request_ids=hopeless)
            self.fail_all(hopeless, BlockyardError(Reason.BUG, f"the worker refuses its steps: {message}"))

    def _fail_poison(self, failure: EpochFailure) -> None:
        """Counts a death against the requests in hand, and fails those with three in a row."""
        if failure.error.reason is Reason.DRAINING:
            return
        # A wrong answer is the worker's fault, unless the worker has answered other requests well.
        is_proof = failure.was_sound or not isinstance(failure.error, WrongAnswer)
        self._deaths.note(failure.in_hand, self._requests.live, is_proof=is_proof)
        if poison := self._deaths.poison:
            log.error("requests kill workers", request_ids=poison)
            message = "the worker died three times in a row while it computed this request"
            self.fail_all(poison, BlockyardError(Reason.POISON_REQUEST, message))


def _find_readiness(engines: Sequence[Engine], latest: Engine | None, missing_workers: str) -> Readiness:
    """Returns whether any replica takes requests, and if not, the reason of the one that reported last."""
    if any(engine.takes_requests for engine in engines):
        return Readiness(True)
    if not engines:
        return Readiness(False, missing_workers or "no worker is known")
    engine = latest if latest is not None and latest in engines else engines[0]
    readiness = engine.readiness
    if readiness.ready:
        readiness = Readiness(False, engine.drain.message)
    message = readiness.message
    return replace(readiness, message=f"{message}; {missing_workers}" if missing_workers else message)


def _cause(error: BlockyardError) -> str:
    """Names what happened to a replica's worker, for operators."""
    if error.reason is Reason.DRAINING:
        return _DRAINED
    if isinstance(error, WrongAnswer):
        return _ANSWERED_WRONG
    return _DIED if is_break(error) else _REFUSED


def _make_record(engine: Engine, cause: str, failure: EpochFailure, now: float) -> RecoveryRecord:
    begun = [num_tokens for _, num_tokens in failure.evacuated if num_tokens]
    return RecoveryRecord(now, engine.replica_id, cause, len(begun), sum(begun))


def _is_outdated(request: Request, engine: Engine) -> bool:
    """Whether a request that has begun would go on with other weights although it must not."""
    if not request.fails_on_update or request.lost is None or engine.facts is None:
        return False
    return engine.facts.weights_version != request.lost.facts.weights_version


def _make_recovery(request: Request, lost: Lost, engine: Engine) -> Recovery:
    """Reports that a request goes on, and whether its tokens are exactly those of an undisturbed run."""
    exact = engine.facts is not None and repeats(lost.facts, engine.facts)
    return Recovery(request.request_id, lost.cause, lost.num_tokens, exact)
