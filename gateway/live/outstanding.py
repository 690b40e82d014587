"""Sends requests, look-ups and aborts to the scheduler and applies its answers, by handle and by sequence id.

The loss of a scheduler ends no request: each request is sent again, with its tokens so far, to the next scheduler. If
that is the same scheduler, it answers with its own record of the request.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from blockyard.contract.scheduling import Abort, AbortReason, Add, Resume
from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from gateway.live.registry import Registry, Timers

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.contract.scheduling import Acceptance, Failure, Resumed, Submission, TokenUpdate
    from gateway.live.answer import SequenceAnswer
    from gateway.live.request_state import RequestState
    from gateway.live.scheduler_link import SchedulerLink

    Listener = Callable[[RequestState, SequenceAnswer], None]

log = EventLogger(__name__)

RETRY_SECONDS = 1.0
SCHEDULER_LOST = "the scheduler was lost"


class RequestLifecycle(Protocol):
    def adopt(self, state: RequestState) -> None:
        """Registers a request that another gateway served before."""

    def retire(self, state: RequestState) -> None:
        """Keeps a request whose sequences have all ended."""

    def fail(self, state: RequestState, error: BlockyardError) -> None: ...


class _Lookup:
    """A look-up of one request at the scheduler, for one or several callers. `handle`: 0 until the look-up is sent."""

    def __init__(self, wire_id: str, make: Callable[[Resumed], RequestState]) -> None:
        self.wire_id = wire_id
        self.make = make
        self.handle = 0
        self.num_callers = 0
        self.answer: asyncio.Future[RequestState | BlockyardError] = asyncio.get_running_loop().create_future()

    def resolve(self, answer: RequestState | BlockyardError) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class TokenRouter:
    """Routes each token to its sequence, by the scheduler's ids: the gateway's inner loop.

    Args:
        on_stop: called when a stop string has ended a sequence that the scheduler still runs.
        on_end: called when the scheduler has ended a sequence.
        on_failure: called when a request's tokens could not be applied; only that request must end.
    """

    def __init__(
        self, on_stop: Listener, on_end: Listener, on_failure: Callable[[RequestState, BlockyardError], None]
    ) -> None:
        self._routes: dict[int, tuple[RequestState, SequenceAnswer]] = {}
        self._on_stop = on_stop
        self._on_end = on_end
        self._on_failure = on_failure

    def add(self, state: RequestState) -> None:
        """Adds the running sequences of a request that the scheduler has accepted."""
        for answer in state.answers:
            if answer.ended is None:
                self._routes[state.sequence_id_of(answer)] = (state, answer)

    def remove(self, state: RequestState, answer: SequenceAnswer) -> None:
        """Removes a sequence. Idempotent."""
        if self._routes.get(sequence_id := state.sequence_id_of(answer)) == (state, answer):
            del self._routes[sequence_id]

    def clear(self) -> None:
        """Removes all sequences: the scheduler's ids have become invalid."""
        self._routes.clear()

    def route(self, update: TokenUpdate) -> None:
        """Routes the tokens and ends of an update. Tokens of a sequence that has ended here are dropped."""
        self._apply_counts(update)
        routes = self._routes
        # Apply log probabilities first: a token that ends the answer needs its own to be there.
        for sequence_id, candidates in update.logprobs:
            if (route := routes.get(sequence_id)) is not None:
                route[1].push_logprobs(candidates)
        for sequence_id, token_id in zip(update.sequence_ids, update.token_ids, strict=True):
            route = routes.get(sequence_id)
            if route is None:
                continue
            state, answer = route
            try:
                is_stopped = answer.push(token_id)
            except Exception:  # noqa: BLE001 - must not end the stream of all requests
                self._fail(state)
                continue
            if is_stopped:
                self._on_stop(state, answer)
            for reader in state.readers:
                if not reader.is_patient:
                    reader.wake()
        pooled = dict(update.pooled)
        for sequence_id, reason, score, error in update.ended:
            route = routes.get(sequence_id)
            if route is None:
                continue
            state, answer = route
            try:
                answer.finish(reason, score, error, pooled.get(sequence_id, b""))
            except Exception:  # noqa: BLE001 - as above
                self._fail(state)
                continue
            self._on_end(state, answer)
            state.wake()

    def _fail(self, state: RequestState) -> None:
        log.exception("the tokens of a request could not be applied", request_id=state.wire_id)
        self._on_failure(state, BlockyardError(Reason.BUG, "internal error; the gateway's log has more"))

    def _apply_counts(self, update: TokenUpdate) -> None:
        """Applies what an update tells beside tokens: of prompts, and of predictions."""
        for sequence_id, prediction in update.predictions:
            if (route := self._routes.get(sequence_id)) is not None:
                route[1].prediction = prediction
        for sequence_id, num_cached_tokens in update.prefilled:
            if (route := self._routes.get(sequence_id)) is not None:
                route[0].num_cached_tokens = num_cached_tokens
                route[0].request_log.on_prefilled()
                route[0].meter.on_first_token()
        for sequence_id, piece in update.prompt_logprobs:
            if (route := self._routes.get(sequence_id)) is not None:
                route[0].add_prompt_piece(piece)


class OutstandingRequests:
    """Tracks the requests and look-ups that are at the scheduler, by handle, or wait for a scheduler."""

    def __init__(
        self,
        link: SchedulerLink,
        registry: Registry,
        router: TokenRouter,
        owner: RequestLifecycle,
        *,
        patience_seconds: float,
    ) -> None:
        self._link = link
        self._registry = registry
        self._routes = router
        self._owner = owner
        self._patience_seconds = patience_seconds
        self._handles = itertools.count(1)
        self._by_handle: dict[int, RequestState | _Lookup] = {}
        self._lookups: dict[str, _Lookup] = {}
        self._unsent = Timers["RequestState"]()

    # Messages to the scheduler.

    def send(self, state: RequestState) -> None:
        """Sends a request, now or when a scheduler is attached."""
        if not self._link.takes_requests:
            self._wait(state)
            return
        self._unsent.clear(state)
        state.handle = self._new_handle(state)
        now = asyncio.get_running_loop().time()
        resubmission = state.make_resubmission(now)
        age_seconds = now - state.origin.arrived_at if state.has_waited and resubmission is None else None
        self._link.send(Add(state.handle, _with_remaining_times(state, now), resubmission, age_seconds))

    def _new_handle(self, item: RequestState | _Lookup) -> int:
        handle = next(self._handles)
        self._by_handle[handle] = item
        return handle

    def _wait(self, state: RequestState) -> None:
        state.has_waited = True
        patience, longest = self._patience_seconds, state.submission.max_queue_seconds
        reason, prefix = Reason.NO_READY_WORKER, ""
        if longest is not None and not state.was_accepted:
            left = longest - (asyncio.get_running_loop().time() - state.origin.arrived_at)
            if left < patience:
                patience, reason = max(0.0, left), Reason.QUEUE_DEADLINE
                prefix = "the request waited longer than max_queue_time: "

        def give_up(state: RequestState) -> None:
            message = prefix + self._link.message
            self._owner.fail(state, BlockyardError(reason, message, retry_after_seconds=RETRY_SECONDS))

        self._unsent.set(state, patience, give_up)

    def abort(self, state: RequestState) -> None:
        """Aborts a request that has no readers here; it continues while another gateway reads it."""
        if state.handle:
            self._link.send(Abort(state.handle, state.wire_id))

    def abort_sequence(self, state: RequestState, answer: SequenceAnswer) -> None:
        """Aborts a sequence after a stop string has ended it here."""
        if state.handle:
            wire_id, reason = state.wire_id, AbortReason.STOP_STRING
            self._link.send(Abort(state.handle, wire_id, reason, answer.index, answer.num_tokens))

    def forget(self, state: RequestState) -> None:
        """Drops a request: later messages about it are ignored."""
        self._by_handle.pop(state.handle, None)
        self._unsent.clear(state)
        for answer in state.answers:
            self._routes.remove(state, answer)

    async def look_up(self, wire_id: str, make: Callable[[Resumed], RequestState]) -> RequestState:
        """Asks the scheduler for a request that is unknown here, and continues it with the state that `make` returns.

        Raises BlockyardError: REQUEST_EXPIRED if the scheduler does not know the request either, NO_READY_WORKER if no
        scheduler answers in time.
        """
        lookup = self._lookups.setdefault(wire_id, _Lookup(wire_id, make))
        lookup.num_callers += 1
        try:
            if not lookup.handle and self._link.takes_requests:
                self._send_lookup(lookup)
            async with asyncio.timeout(self._patience_seconds):
                answer = await asyncio.shield(lookup.answer)
        except TimeoutError:
            answer = BlockyardError(Reason.NO_READY_WORKER, self._link.message, retry_after_seconds=RETRY_SECONDS)
        finally:
            lookup.num_callers -= 1
            # Keep a look-up that was sent even without callers: the scheduler counts this gateway as a reader.
            if not (lookup.num_callers or lookup.handle) and self._lookups.get(wire_id) is lookup:
                del self._lookups[wire_id]
        if isinstance(answer, BlockyardError):
            raise answer
        return answer

    def _send_lookup(self, lookup: _Lookup) -> None:
        lookup.handle = self._new_handle(lookup)
        self._link.send(Resume(lookup.handle, lookup.wire_id))

    def resend_all(self) -> None:
        """Sends all requests and look-ups to a new scheduler; requests that the last scheduler accepted come first."""
        unsent = [state for state in self._registry.live if not state.handle]
        for state in sorted(unsent, key=lambda state: not state.was_accepted):
            if state.advance():
                # The last tokens contain a stop string.
                self._owner.retire(state)
            else:
                self.send(state)
        for lookup in self._lookups.values():
            if not lookup.handle:
                self._send_lookup(lookup)
        whole = [state for state in self._registry.retained if not state.handle]
        for state in whole:
            self.send(state)
        if unsent or whole:
            log.info("sent requests again", num_requests=len(unsent), num_answers=len(whole))

    # Messages from the scheduler.

    def on_scheduler_lost(self) -> None:
        """Forgets all handles, and makes all requests wait for a scheduler."""
        self._by_handle.clear()
        self._routes.clear()
        for lookup in self._lookups.values():
            lookup.handle = 0
        for state in self._registry.retained:
            state.handle = 0
        for state in self._registry.live:
            state.handle = 0
            state.request_log.on_scheduler_lost()
            self._wait(state)

    def on_accepted(self, acceptance: Acceptance) -> None:
        """Marks a request as queued. A request that was queued before continues after its tokens so far."""
        state = self._by_handle.get(acceptance.handle)
        if state is None or isinstance(state, _Lookup):
            return
        if not self._registry.is_live(state):
            # The answer is complete, and the scheduler keeps it for other gateways.
            del self._by_handle[acceptance.handle]
            return
        if state.is_accepted:
            self._on_scheduler_returned(state)
        if (facts := self._link.facts) is not None:
            state.on_weights(facts.weights_version)
        state.on_accepted(acceptance.first_sequence_id)
        self._routes.add(state)

    def _on_scheduler_returned(self, state: RequestState) -> None:
        facts = self._link.facts
        exact = facts is not None and facts.batch_invariant and facts.determinism_id == state.determinism_id
        state.on_recovered(state.make_recovered_event(SCHEDULER_LOST, exact=exact))

    def on_resumed(self, resumed: Resumed) -> None:
        """Continues a request, of this gateway or another, from the scheduler's record of it."""
        state = self._by_handle.get(resumed.handle)
        if isinstance(state, _Lookup):
            state = self._adopt(state, resumed)
        if state is None:
            return
        state.on_resumed(resumed)
        self._routes.add(state)
        is_behind = self._end_sequences(state, resumed)
        if state.has_ended:
            self._by_handle.pop(resumed.handle, None)
            if is_behind:
                # Other gateways read on; for this one the scheduler need not compute the rest again.
                self.abort(state)
        if state.has_ended and self._registry.is_live(state):
            self._owner.retire(state)

    def _end_sequences(self, state: RequestState, resumed: Resumed) -> bool:
        """Ends the sequences at the scheduler that have ended here; returns whether it has less of one than this
        gateway. Such a sequence goes on, since the scheduler would end it for all gateways without its last tokens."""
        is_behind = False
        for answer, record in zip(state.answers, resumed.sequences, strict=True):
            if answer.ended is None or record.reason is not None:
                continue
            if answer.ended.pooled_values or len(record.token_ids) < answer.num_tokens:
                is_behind = True
            else:
                self.abort_sequence(state, answer)
        return is_behind

    def _adopt(self, lookup: _Lookup, resumed: Resumed) -> RequestState | None:
        """Makes a request from the scheduler's record, unless the request has reached this gateway meanwhile."""
        self._close_lookup(lookup)
        known = self._registry.find(lookup.wire_id)
        if known is not None:
            lookup.resolve(known)
            return None
        try:
            state = lookup.make(resumed)
        except BlockyardError as error:
            lookup.resolve(error)
            return None
        state.handle = resumed.handle
        self._by_handle[resumed.handle] = state
        self._owner.adopt(state)
        lookup.resolve(state)
        return state

    def _close_lookup(self, lookup: _Lookup) -> None:
        self._by_handle.pop(lookup.handle, None)
        self._lookups.pop(lookup.wire_id, None)

    def on_failed(self, failure: Failure) -> None:
        """Ends a request that the scheduler refused or failed, or answers a look-up of an unknown request."""
        item = self._by_handle.get(failure.handle)
        if isinstance(item, _Lookup):
            self._close_lookup(item)
            item.resolve(self._registry.find(item.wire_id) or failure.error)
        elif item is not None and self._registry.is_live(item):
            self._owner.fail(item, failure.error)
        else:
            self._by_handle.pop(failure.handle, None)

    def close(self, error: BlockyardError) -> None:
        """Answers all look-ups with an error, and stops all waiting for a scheduler."""
        for lookup in list(self._lookups.values()):
            lookup.resolve(error)
        self._lookups.clear()
        self._unsent.clear_all()


def _with_remaining_times(state: RequestState, now: float) -> Submission:
    """Returns the submission with the remaining queueing time and deadline."""
    submission, origin = state.submission, state.origin
    deadline, queueing = origin.deadline_at, submission.max_queue_seconds
    if deadline is None and queueing is None:
        return submission
    if queueing is not None and not state.was_accepted:
        queueing = max(0.0, queueing - (now - origin.arrived_at))
    remaining = None if deadline is None else max(0.0, deadline - now)
    return replace(submission, max_queue_seconds=queueing, remaining_seconds=remaining)
