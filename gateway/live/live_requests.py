"""Owns this gateway's requests: their limit, their readers and their ends. Knows neither text nor preparation."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockyard.contract.events import Recovered
from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from gateway.live.outstanding import RETRY_SECONDS, OutstandingRequests, TokenRouter
from gateway.live.prompt_history import PromptHistory
from gateway.live.reader import Reader
from gateway.live.registry import Registry, Timers
from gateway.observe.metrics import GatewayMetrics, MeasuredRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from blockyard.contract.request import Position
    from blockyard.contract.scheduling import Progress, Resumed
    from gateway.live.answer import SequenceAnswer
    from gateway.live.request_state import RequestState
    from gateway.live.scheduler_link import SchedulerLink

log = EventLogger(__name__)


class Admission:
    """Refuses new requests at the gateway's limit.

    Args:
        max_requests: the most requests at the same time; 0: no limit.
        num_running: returns the number of requests that have begun.
    """

    def __init__(self, max_requests: int, num_running: Callable[[], int]) -> None:
        self._max_requests = max_requests
        self._num_running = num_running
        self._num_beginning = 0

    @contextmanager
    def beginning(self, *, is_new: bool) -> Generator[None]:
        """Counts a request while it is prepared; raises BlockyardError QUEUE_FULL for a new request at the limit.

        `is_new`: whether no client has a part of the request's answer; other requests are always admitted.
        """
        if is_new and 0 < self._max_requests <= self._num_running() + self._num_beginning:
            message = f"this gateway has reached its limit of {self._max_requests} requests (--max-requests): try again"
            raise BlockyardError(Reason.QUEUE_FULL, message, retry_after_seconds=RETRY_SECONDS)
        self._num_beginning += 1
        try:
            yield
        finally:
            self._num_beginning -= 1


class LiveRequests:
    """Opens, resumes, reads and ends requests by their names on the wire. Only used on the event loop.

    Args:
        link: the connection to the scheduler.
        resume_window_seconds: the time for which a request runs without readers, and an ended answer is kept.
        max_scheduler_wait_seconds: the time for which requests wait for a scheduler.
        metrics: the metrics of the requests; None: new metrics.
        num_past_prompts: the number of prompts whose ids are kept after their requests have ended.

    Attributes:
        history: the prompts of the requests that have ended.
    """

    def __init__(
        self,
        link: SchedulerLink,
        *,
        resume_window_seconds: float = 60.0,
        max_scheduler_wait_seconds: float = 300.0,
        metrics: GatewayMetrics | None = None,
        num_past_prompts: int = 0,
    ) -> None:
        self.metrics = metrics or GatewayMetrics()
        self._link = link
        self._window_seconds = resume_window_seconds
        self._registry = Registry(resume_window_seconds)
        self._router = TokenRouter(self.on_stop_string, self._on_sequence_ended, self._abort)
        self._outstanding = OutstandingRequests(
            link, self._registry, self._router, self, patience_seconds=max_scheduler_wait_seconds
        )
        self.history = PromptHistory(num_past_prompts)
        self._readers: set[Reader] = set()
        # Timers of the requests without a reader.
        self._unread = Timers["RequestState"]()
        self.on_idle: Callable[[], None] | None = None

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def num_running(self) -> int:
        return self._registry.num_live

    @property
    def num_started(self) -> int:
        """The number of requests that have begun here so far."""
        return self._registry.num_added

    def find(self, wire_id: str) -> RequestState | None:
        """Returns the request of this name, if it runs or ended within the resume window."""
        return self._registry.find(wire_id)

    def _find_live(self, wire_id: str) -> RequestState | None:
        found = self._registry.find(wire_id)
        return found if found is not None and self._registry.is_live(found) else None

    # Beginnings of requests.

    def open(self, state: RequestState) -> None:
        """Begins a request, or continues a request that no server knows any more."""
        self.adopt(state)
        if not state.origin.is_known:
            accepted, log = state.origin.accepted, state.request_log
            request = MeasuredRequest(log.operation, accepted.model, log.span.trace_id)
            state.meter = self.metrics.begin_request(accepted.num_prompt_tokens, log.arrived_at, request)
        self._outstanding.send(state)
        if state.has_ended:
            # The answer is complete. The scheduler was sent the request to keep it for other gateways.
            state.is_accepted = True
            self.retire(state)

    def adopt(self, state: RequestState) -> None:
        """Registers a request, and starts the timer for its first reader."""
        state.meter = self.metrics.resume_request(state.request_log.span.trace_id)
        self._registry.add(state)
        self._await_reader(state)

    async def look_up(self, wire_id: str, make: Callable[[Resumed], RequestState]) -> RequestState:
        """Continues a request that another gateway served; see OutstandingRequests.look_up."""
        return await self._outstanding.look_up(wire_id, make)

    # Readers.

    def read(self, state: RequestState, positions: Mapping[int, Position], *, replay: bool = False) -> Reader:
        """Adds a reader; raises BlockyardError FIELD_INVALID for positions that the answer cannot have."""
        reader = Reader(state, self, positions, replay=replay)
        reader.check()
        state.meter.on_read_from(positions)
        state.readers.append(reader)
        self._readers.add(reader)
        self._unread.clear(state)
        return reader

    def on_reader_closed(self, reader: Reader) -> None:
        """Removes a reader. After its last reader a request ends, or runs for the resume window if it is kept."""
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        state = reader.state
        state.readers.remove(reader)
        if self._registry.is_live(state) and not state.readers:
            if state.origin.outlives_readers:
                self._await_reader(state)
            else:
                self._end(state, "the request was closed")
        if not self._readers and self.on_idle is not None:
            self.on_idle()

    def _await_reader(self, state: RequestState) -> None:
        self._unread.set(state, self._window_seconds, self._abandon)

    def _abandon(self, state: RequestState) -> None:
        log.info("nobody came back for a request", request_id=state.wire_id)
        self._end(state, "no client came back for the request in time")

    # Ends of requests.

    def cancel(self, wire_ids: Iterable[str]) -> list[str]:
        """Ends requests with CLIENT_CANCELLED, and returns the names of the requests that were running."""
        cancelled = [found for name in dict.fromkeys(wire_ids) if (found := self._find_live(name))]
        for state in cancelled:
            self._end(state, "the request was cancelled")
        return [state.wire_id for state in cancelled]

    def _end(self, state: RequestState, message: str) -> None:
        self._abort(state, BlockyardError(Reason.CLIENT_CANCELLED, message))

    def _abort(self, state: RequestState, error: BlockyardError) -> None:
        """Fails a request here, and aborts it at the scheduler."""
        self._outstanding.abort(state)
        self.fail(state, error)

    def end_all(self, error: BlockyardError) -> None:
        """Ends every request here, but not at the scheduler, so that another gateway can resume it."""
        for state in self._registry.live:
            self.fail(state, error)
        self._outstanding.close(error)
        self._registry.close()

    def fail(self, state: RequestState, error: BlockyardError) -> None:
        """Removes a running request. Its readers get the error after all earlier events."""
        self._forget(state)
        self._registry.remove(state)
        state.request_log.on_failed(state.token_counts, error)
        state.meter.on_failed(error.reason)
        state.fail(error)

    def retire(self, state: RequestState) -> None:
        """Keeps a request whose sequences have all ended for the resume window."""
        self._forget(state)
        self._registry.retain(state)
        if (failure := state.failure) is not None:
            state.request_log.on_failed(state.token_counts, failure)
            state.meter.on_failed(failure.reason)
        else:
            ends = state.ends
            reasons = [end.reason for end in ends]
            state.request_log.on_finished(state.token_counts, reasons, [end.error for end in ends if end.error])
            state.meter.on_finished([answer.num_tokens for answer in state.answers], reasons)

    def _forget(self, state: RequestState) -> None:
        self._outstanding.forget(state)
        self._unread.clear(state)
        self.history.add(state, asyncio.get_running_loop().time())

    def on_stop_string(self, state: RequestState, answer: SequenceAnswer) -> None:
        """Aborts a sequence at the scheduler after a stop string has ended it here."""
        if self._registry.is_live(state):
            self._outstanding.abort_sequence(state, answer)
            self._on_sequence_ended(state, answer)

    def _on_sequence_ended(self, state: RequestState, answer: SequenceAnswer) -> None:
        self._router.remove(state, answer)
        if state.has_ended:
            self.retire(state)

    # Events of the scheduler.

    def on_scheduler_lost(self) -> None:
        """Makes all requests wait for a scheduler, to which they are sent again."""
        self.metrics.scheduler_losses.add()
        self._outstanding.on_scheduler_lost()

    def on_progress(self, progress: Progress) -> None:
        if progress.facts is not None and self._link.takes_requests:
            self._outstanding.resend_all()
        for acceptance in progress.accepted:
            self._outstanding.on_accepted(acceptance)
        for resumed in progress.resumed:
            self._outstanding.on_resumed(resumed)
        for recovery in progress.recovered:
            if state := self._find_live(recovery.request_id):
                state.on_recovered(Recovered(recovery.cause, recovery.num_replayed_tokens, recovery.exact))
        for request_id, version in progress.weights:
            if state := self._find_live(request_id):
                state.on_weights(version)
        self._router.route(progress.update)
        # Apply failures after the tokens of the same message, which precede them.
        for failure in progress.failed:
            self._outstanding.on_failed(failure)
