"""The requests that run: which there are, whose each token is, and what the scheduler is told of their ends.

Hands the scheduler's messages to the generations that they concern; does no text work itself, but for what `answer`
does with unread tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from blockyard.errors import BlockyardError, Reason
from gateway.attachment import Abort, AbortReason
from gateway.request import Recovered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from gateway.answer import SequenceAnswer
    from gateway.attachment import Acceptance, Progress, Submission
    from gateway.generation import Generation

RETRY_SECONDS = 1.0


class Outlet(Protocol):
    """Where requests and aborts go: the link to the scheduler."""

    def add(self, submission: Submission) -> None:
        """Sends a request."""
        ...

    def abort(self, abort: Abort) -> None:
        """Sends an abort."""
        ...


class LiveRequests:
    """Routes what the scheduler says, by request and sequence id, and keeps ids unique."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self._reserved: set[str] = set()
        self._by_request_id: dict[str, Generation] = {}
        self._by_wire_id: dict[str, Generation] = {}
        self._routes: dict[int, tuple[Generation, SequenceAnswer]] = {}
        # Ended here before the scheduler answered: the answer must not be taken for that of a later namesake.
        self._unanswered: set[str] = set()
        # Until their readers have left.
        self._open: set[Generation] = set()
        self.on_idle: Callable[[], None] | None = None

    @property
    def num_open(self) -> int:
        """Requests that somebody still reads."""
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Requests that the scheduler works on."""
        return len(self._by_request_id)

    def reserve(self, request_id: str) -> None:
        """Keeps an id for a request on its way; raises BlockyardError REQUEST_ID_CONFLICT when it is taken."""
        if request_id in self._reserved or request_id in self._by_request_id:
            raise BlockyardError(Reason.REQUEST_ID_CONFLICT, f"request_id {request_id!r} is in use by a live request")
        self._reserved.add(request_id)

    def unreserve(self, request_id: str) -> None:
        """Gives a reserved id back."""
        self._reserved.discard(request_id)

    def wire_id(self, request_id: str) -> str:
        """The id that the scheduler knows a new request by: the same, but for a namesake that it has yet to answer."""
        wire_id, attempt = request_id, 1
        while wire_id in self._unanswered:
            attempt += 1
            wire_id = f"{request_id}~{attempt}"
        return wire_id

    def open(self, generation: Generation, submission: Submission) -> None:
        """Sends a request and lets its generation run."""
        self._open.add(generation)
        self._by_request_id[generation.request_id] = generation
        self._by_wire_id[submission.request_id] = generation
        self._outlet.add(submission)

    def close(self, generation: Generation) -> None:
        """Ends a generation whose reader has left; what still runs is aborted."""
        if self._by_request_id.get(generation.request_id) is generation:
            self._end(generation, BlockyardError(Reason.CLIENT_CANCELLED, "the request was closed"))
        self._open.discard(generation)
        if not self._open and self.on_idle is not None:
            self.on_idle()

    def cancel(self, request_ids: Iterable[str]) -> list[str]:
        """Ends requests with CLIENT_CANCELLED and returns the ids of those that ran."""
        return [i for i in dict.fromkeys(request_ids) if self._cancel(i)]

    def _cancel(self, request_id: str) -> bool:
        generation = self._by_request_id.get(request_id)
        if generation is not None:
            self._end(generation, BlockyardError(Reason.CLIENT_CANCELLED, "the request was cancelled"))
        return generation is not None

    def end_all(self, error: BlockyardError) -> None:
        """Ends every request with an error and aborts it."""
        for generation in list(self._by_request_id.values()):
            self._end(generation, error)

    def lost(self, message: str) -> None:
        """The scheduler is gone, and every request with it."""
        generations = list(self._by_request_id.values())
        self._by_request_id.clear()
        self._by_wire_id.clear()
        self._routes.clear()
        self._unanswered.clear()
        for generation in generations:
            generation.fail(BlockyardError(Reason.NO_READY_WORKER, message, retry_after_seconds=RETRY_SECONDS))

    def received(self, progress: Progress) -> None:
        """Hands out one message of the scheduler."""
        for acceptance in progress.accepted:
            self._accepted(acceptance)
        for request_id, error in progress.failed:
            self._failed(request_id, error)
        for recovery in progress.recovered:
            if generation := self._by_wire_id.get(recovery.request_id):
                generation.recover(Recovered(recovery.cause, recovery.num_replayed_tokens, recovery.exact))
        routes = self._routes
        for sequence_id, num_cached_tokens in progress.prefilled:
            if sequence_id in routes:
                routes[sequence_id][0].num_cached_tokens = num_cached_tokens
        for sequence_id, token_id in zip(progress.sequence_ids, progress.token_ids, strict=True):
            route = routes.get(sequence_id)
            # One that ended here may get tokens until the scheduler knows.
            if route is None:
                continue
            generation, answer = route
            if answer.push(token_id):
                self.stopped(generation, answer)
            generation.wake()
        for sequence_id, reason, _ in progress.ended:
            route = routes.get(sequence_id)
            if route is None:
                continue
            generation, answer = route
            answer.finish(reason)
            self._forget_sequence(generation, answer)
            generation.wake()

    def stopped(self, generation: Generation, answer: SequenceAnswer) -> None:
        """A stop string ended a sequence that the scheduler still runs."""
        if generation.route_of(answer) not in self._routes:
            return
        self._outlet.abort(Abort(generation.wire_id, AbortReason.STOP_STRING, answer.index, answer.num_tokens))
        self._forget_sequence(generation, answer)

    def _accepted(self, acceptance: Acceptance) -> None:
        generation = self._by_wire_id.get(acceptance.request_id)
        if generation is None:
            self._unanswered.discard(acceptance.request_id)
            return
        generation.accept(acceptance.first_sequence_id)
        for answer in generation.answers:
            self._routes[generation.route_of(answer)] = (generation, answer)

    def _failed(self, wire_id: str, error: BlockyardError) -> None:
        generation = self._by_wire_id.get(wire_id)
        if generation is None:
            self._unanswered.discard(wire_id)
            return
        self._forget(generation)
        generation.fail(error)

    def _end(self, generation: Generation, error: BlockyardError) -> None:
        if not generation.is_accepted:
            self._unanswered.add(generation.wire_id)
        self._outlet.abort(Abort(generation.wire_id))
        self._forget(generation)
        generation.fail(error)

    def _forget(self, generation: Generation) -> None:
        del self._by_request_id[generation.request_id]
        del self._by_wire_id[generation.wire_id]
        if generation.is_accepted:
            for answer in generation.answers:
                self._routes.pop(generation.route_of(answer), None)

    def _forget_sequence(self, generation: Generation, answer: SequenceAnswer) -> None:
        del self._routes[generation.route_of(answer)]
        if all(other.ended is not None for other in generation.answers):
            self._forget(generation)
