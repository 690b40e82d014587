"""What the scheduler is sent and what it answers: requests, questions for requests, aborts, each under our own number.

When the scheduler is gone nothing ends: what it had is sent again, with all that is known of it, to the one that comes
next, or to the same one, which then says what it has.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from gateway.live.timers import Timers
from gateway.scheduler_messages import Abort, AbortReason, Add, Resume

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.live.answer import SequenceAnswer
    from gateway.live.registry import Registry
    from gateway.live.request_state import Transcript
    from gateway.live.token_router import Routes
    from gateway.scheduler_messages import Acceptance, Failure, ModelFacts, Outgoing, Resumed, Submission

log = EventLogger(__name__)

RETRY_SECONDS = 1.0
SCHEDULER_LOST = "the scheduler was lost"


class Outlet(Protocol):
    """Where requests go: the link to the scheduler."""

    @property
    def facts(self) -> ModelFacts | None:
        """What is known of the model."""
        ...

    @property
    def takes_requests(self) -> bool:
        """Whether requests can be sent; the scheduler lets them wait while no worker is ready."""
        ...

    @property
    def message(self) -> str:
        """If not ready: what is missing, for a person."""
        ...

    def send(self, item: Outgoing) -> None:
        """Sends it, with all that is sent in this turn of the loop."""
        ...


class Owner(Protocol):
    """Who decides what becomes of requests."""

    def adopt(self, transcript: Transcript) -> None:
        """Takes a request that another gateway had."""
        ...

    def retire(self, transcript: Transcript) -> None:
        """Takes the end of the last sequence."""
        ...

    def fail(self, transcript: Transcript, error: BlockyardError) -> None:
        """Takes a failure."""
        ...


class _Question:
    """A name that the scheduler is asked for, by one caller or by several. `handle` is 0 while none was asked."""

    def __init__(self, wire_id: str, make: Callable[[Resumed], Transcript]) -> None:
        self.wire_id = wire_id
        self.make = make
        self.handle = 0
        self.num_callers = 0
        self.answer: asyncio.Future[Transcript | BlockyardError] = asyncio.get_running_loop().create_future()

    def resolve(self, answer: Transcript | BlockyardError) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Submissions:
    """What is at the scheduler, by handle, and what waits for one."""

    def __init__(
        self, outlet: Outlet, registry: Registry, routes: Routes, owner: Owner, *, patience_seconds: float
    ) -> None:
        self._outlet = outlet
        self._registry = registry
        self._routes = routes
        self._owner = owner
        self._patience_seconds = patience_seconds
        self._handles = itertools.count(1)
        self._by_handle: dict[int, Transcript | _Question] = {}
        self._questions: dict[str, _Question] = {}
        self._unsent = Timers["Transcript"]()

    # Up.

    def send(self, transcript: Transcript) -> None:
        """Sends a request, now or when there is a scheduler."""
        if not self._outlet.takes_requests:
            self._wait(transcript)
            return
        self._unsent.clear(transcript)
        transcript.handle = self._new_handle(transcript)
        now = asyncio.get_running_loop().time()
        resubmission = transcript.resubmission(now)
        age_seconds = now - transcript.origin.arrived_at if transcript.has_waited and resubmission is None else None
        self._outlet.send(Add(transcript.handle, _timed(transcript, now), resubmission, age_seconds))

    def _new_handle(self, item: Transcript | _Question) -> int:
        handle = next(self._handles)
        self._by_handle[handle] = item
        return handle

    def _wait(self, transcript: Transcript) -> None:
        transcript.has_waited = True
        patience, longest = self._patience_seconds, transcript.submission.max_queue_seconds
        reason, told = Reason.NO_READY_WORKER, ""
        if longest is not None and not transcript.was_accepted:
            left = longest - (asyncio.get_running_loop().time() - transcript.origin.arrived_at)
            if left < patience:
                patience, reason, told = max(0.0, left), Reason.QUEUE_DEADLINE, "it waited longer than it was to: "

        def give_up(transcript: Transcript) -> None:
            message = told + self._outlet.message
            self._owner.fail(transcript, BlockyardError(reason, message, retry_after_seconds=RETRY_SECONDS))

        self._unsent.set(transcript, patience, give_up)

    def abort(self, transcript: Transcript) -> None:
        """Ends a request that nobody wants any more; the scheduler lets it run on while another gateway reads it."""
        if transcript.handle:
            self._outlet.send(Abort(transcript.handle, transcript.wire_id))

    def abort_sequence(self, transcript: Transcript, answer: SequenceAnswer) -> None:
        """Ends a sequence that a stop string has ended here."""
        if transcript.handle:
            wire_id, reason = transcript.wire_id, AbortReason.STOP_STRING
            self._outlet.send(Abort(transcript.handle, wire_id, reason, answer.index, answer.num_tokens))

    def forget(self, transcript: Transcript) -> None:
        """Takes nothing for a request any more."""
        self._by_handle.pop(transcript.handle, None)
        self._unsent.clear(transcript)
        for answer in transcript.answers:
            self._routes.remove(transcript, answer)

    async def ask(self, wire_id: str, make: Callable[[Resumed], Transcript]) -> Transcript:
        """Asks for a request that is not known here, and goes on with what `make` makes of it.

        Raises BlockyardError: REQUEST_EXPIRED when the scheduler does not know it either, NO_READY_WORKER when none
        comes in time.
        """
        question = self._questions.setdefault(wire_id, _Question(wire_id, make))
        question.num_callers += 1
        try:
            if not question.handle and self._outlet.takes_requests:
                self._put(question)
            async with asyncio.timeout(self._patience_seconds):
                answer = await asyncio.shield(question.answer)
        except TimeoutError:
            answer = BlockyardError(Reason.NO_READY_WORKER, self._outlet.message, retry_after_seconds=RETRY_SECONDS)
        finally:
            question.num_callers -= 1
            # One that was put is answered, whoever still wants to know: the scheduler takes this gateway for a reader.
            if not (question.num_callers or question.handle) and self._questions.get(wire_id) is question:
                del self._questions[wire_id]
        if isinstance(answer, BlockyardError):
            raise answer
        return answer

    def _put(self, question: _Question) -> None:
        question.handle = self._new_handle(question)
        self._outlet.send(Resume(question.handle, question.wire_id))

    def send_all(self) -> None:
        """Tells a scheduler that has come all that is known, first what its predecessor had accepted."""
        unsent = [transcript for transcript in self._registry.live if not transcript.handle]
        for transcript in sorted(unsent, key=lambda transcript: not transcript.was_accepted):
            if transcript.advance():
                # A stop string was in what came last.
                self._owner.retire(transcript)
            else:
                self.send(transcript)
        for question in self._questions.values():
            if not question.handle:
                self._put(question)
        whole = [transcript for transcript in self._registry.retained if not transcript.handle]
        for transcript in whole:
            self.send(transcript)
        if unsent or whole:
            log.info("sent requests again", num_requests=len(unsent), num_answers=len(whole))

    # Down.

    def lost(self) -> None:
        """The scheduler is gone, or the connection to it."""
        self._by_handle.clear()
        self._routes.clear()
        for question in self._questions.values():
            question.handle = 0
        for transcript in self._registry.retained:
            transcript.handle = 0
        for transcript in self._registry.live:
            transcript.handle = 0
            transcript.story.scheduler_lost()
            self._wait(transcript)

    def accepted(self, acceptance: Acceptance) -> None:
        """A request is queued; one that was so before is behind what has come of it."""
        transcript = self._by_handle.get(acceptance.handle)
        if transcript is None or isinstance(transcript, _Question):
            return
        if not self._registry.is_live(transcript):
            # It is whole: the scheduler keeps it for others.
            del self._by_handle[acceptance.handle]
            return
        if transcript.is_accepted:
            self._tell_recovery(transcript)
        transcript.accept(acceptance.first_sequence_id)
        self._routes.add(transcript)

    def _tell_recovery(self, transcript: Transcript) -> None:
        facts = self._outlet.facts
        exact = facts is not None and facts.batch_invariant and facts.determinism_id == transcript.determinism_id
        transcript.recover(transcript.recovered(SCHEDULER_LOST, exact=exact))

    def resumed(self, resumed: Resumed) -> None:
        """The scheduler has the request, from this gateway or another: what it has goes on behind what is here."""
        transcript = self._by_handle.get(resumed.handle)
        if isinstance(transcript, _Question):
            transcript = self._answer(transcript, resumed)
        if transcript is None:
            return
        transcript.take_up(resumed)
        self._routes.add(transcript)
        for answer, record in zip(transcript.answers, resumed.sequences, strict=True):
            if answer.ended is not None and record.reason is None:
                self.abort_sequence(transcript, answer)
        if transcript.has_ended:
            self._by_handle.pop(resumed.handle, None)
        if transcript.has_ended and self._registry.is_live(transcript):
            self._owner.retire(transcript)

    def _answer(self, question: _Question, resumed: Resumed) -> Transcript | None:
        """Makes a request of what the scheduler has, unless it has come here another way meanwhile."""
        self._close(question)
        known = self._registry.find(question.wire_id)
        if known is not None:
            question.resolve(known)
            return None
        try:
            transcript = question.make(resumed)
        except BlockyardError as error:
            question.resolve(error)
            return None
        transcript.handle = resumed.handle
        self._by_handle[resumed.handle] = transcript
        self._owner.adopt(transcript)
        question.resolve(transcript)
        return transcript

    def _close(self, question: _Question) -> None:
        self._by_handle.pop(question.handle, None)
        self._questions.pop(question.wire_id, None)

    def failed(self, failure: Failure) -> None:
        """The scheduler has refused or ended a request, or does not know it."""
        item = self._by_handle.get(failure.handle)
        if isinstance(item, _Question):
            self._close(item)
            item.resolve(self._registry.find(item.wire_id) or failure.error)
        elif item is not None and self._registry.is_live(item):
            self._owner.fail(item, failure.error)
        else:
            self._by_handle.pop(failure.handle, None)

    def close(self, error: BlockyardError) -> None:
        """Waits for nothing any more."""
        for question in list(self._questions.values()):
            question.resolve(error)
        self._questions.clear()
        self._unsent.clear_all()


def _timed(transcript: Transcript, now: float) -> Submission:
    """The submission, with the times that are left."""
    submission, origin = transcript.submission, transcript.origin
    deadline, queueing = origin.deadline_at, submission.max_queue_seconds
    if deadline is None and queueing is None:
        return submission
    if queueing is not None and not transcript.was_accepted:
        queueing = max(0.0, queueing - (now - origin.arrived_at))
    remaining = None if deadline is None else max(0.0, deadline - now)
    return replace(submission, max_queue_seconds=queueing, remaining_seconds=remaining)
