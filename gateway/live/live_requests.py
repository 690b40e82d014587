"""The requests that this gateway knows, their readers and their ends. Knows neither text nor how requests are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from gateway.live.outstanding import Submissions
from gateway.live.reader import Reader
from gateway.live.registry import Registry
from gateway.live.timers import Timers
from gateway.live.token_router import Routes
from gateway.observe.metrics import GatewayMetrics
from gateway.request import Recovered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gateway.live.answer import SequenceAnswer
    from gateway.live.outstanding import Outlet
    from gateway.live.request_state import Transcript
    from gateway.request import Position
    from gateway.scheduler_messages import Progress, Resumed

log = EventLogger(__name__)


class LiveRequests:
    """Requests by their names on the wire. Runs on the loop.

    Args:
        outlet: to the scheduler.
        resume_window_seconds: how long a request outlives its last reader, and an answer its end.
        max_scheduler_wait_seconds: how long requests wait for a scheduler.
        metrics: get what is measured of requests.
    """

    def __init__(
        self,
        outlet: Outlet,
        *,
        resume_window_seconds: float = 60.0,
        max_scheduler_wait_seconds: float = 300.0,
        metrics: GatewayMetrics | None = None,
    ) -> None:
        self.metrics = metrics or GatewayMetrics()
        self._outlet = outlet
        self._window_seconds = resume_window_seconds
        self._registry = Registry(resume_window_seconds)
        self._routes = Routes(self.stopped, self._sequence_ended)
        self._submissions = Submissions(
            outlet, self._registry, self._routes, self, patience_seconds=max_scheduler_wait_seconds
        )
        self._readers: set[Reader] = set()
        # Requests that nobody reads.
        self._unread = Timers["Transcript"]()
        self.on_idle: Callable[[], None] | None = None

    @property
    def num_readers(self) -> int:
        """Answers that somebody reads."""
        return len(self._readers)

    @property
    def num_running(self) -> int:
        """Requests that have not ended."""
        return self._registry.num_live

    def find(self, wire_id: str) -> Transcript | None:
        """The request of this name, if it runs or has ended not long ago."""
        return self._registry.find(wire_id)

    def _find_live(self, wire_id: str) -> Transcript | None:
        found = self._registry.find(wire_id)
        return found if found is not None and self._registry.is_live(found) else None

    # Begins.

    def open(self, transcript: Transcript) -> None:
        """Begins a request, or goes on with one that nobody else remembers."""
        self.adopt(transcript)
        if not transcript.origin.is_known:
            transcript.meter = self.metrics.begin(transcript)
        self._submissions.send(transcript)
        if transcript.has_ended:
            # There is nothing to wait for; the scheduler keeps it for others.
            transcript.is_accepted = True
            self.retire(transcript)

    def adopt(self, transcript: Transcript) -> None:
        """Takes a request in. It waits for its first reader."""
        transcript.meter = self.metrics.go_on()
        self._registry.add(transcript)
        self._await_reader(transcript)

    async def ask(self, wire_id: str, make: Callable[[Resumed], Transcript]) -> Transcript:
        """Goes on with a request that another gateway had; see Submissions.ask."""
        return await self._submissions.ask(wire_id, make)

    # Readers.

    def read(self, transcript: Transcript, positions: Mapping[int, Position], *, replay: bool = False) -> Reader:
        """Adds a reader; raises BlockyardError FIELD_INVALID for positions that its answer has not."""
        reader = Reader(transcript, self, positions, replay=replay)
        reader.check()
        transcript.meter.knows(positions)
        transcript.readers.append(reader)
        self._readers.add(reader)
        self._unread.clear(transcript)
        return reader

    def close(self, reader: Reader) -> None:
        """Lets a reader go. With the last one the request ends, or runs on for the window if it outlives them."""
        if reader not in self._readers:
            return
        self._readers.remove(reader)
        transcript = reader.transcript
        transcript.readers.remove(reader)
        if self._registry.is_live(transcript) and not transcript.readers:
            if transcript.origin.outlives_readers:
                self._await_reader(transcript)
            else:
                self._end(transcript, "the request was closed")
        if not self._readers and self.on_idle is not None:
            self.on_idle()

    def _await_reader(self, transcript: Transcript) -> None:
        self._unread.set(transcript, self._window_seconds, self._abandon)

    def _abandon(self, transcript: Transcript) -> None:
        log.info("nobody came back for a request", request_id=transcript.wire_id)
        self._end(transcript, "nobody came back for the request")

    # Ends.

    def cancel(self, wire_ids: Iterable[str]) -> list[str]:
        """Ends requests with CLIENT_CANCELLED and returns the names of those that ran."""
        cancelled = [found for name in dict.fromkeys(wire_ids) if (found := self._find_live(name))]
        for transcript in cancelled:
            self._end(transcript, "the request was cancelled")
        return [transcript.wire_id for transcript in cancelled]

    def _end(self, transcript: Transcript, message: str) -> None:
        self._submissions.abort(transcript)
        self.fail(transcript, BlockyardError(Reason.CLIENT_CANCELLED, message))

    def end_all(self, error: BlockyardError) -> None:
        """Ends every request here. The scheduler is not told: it goes on, for whoever asks."""
        for transcript in self._registry.live:
            self.fail(transcript, error)
        self._submissions.close(error)
        self._registry.close()

    def fail(self, transcript: Transcript, error: BlockyardError) -> None:
        """Forgets a request that runs; its readers are told why after what has come."""
        self._forget(transcript)
        self._registry.remove(transcript)
        transcript.story.failed(transcript, error)
        transcript.meter.failed(error.reason)
        transcript.fail(error)

    def retire(self, transcript: Transcript) -> None:
        """Keeps a request of which all has ended, for those who ask again."""
        self._forget(transcript)
        self._registry.retain(transcript)
        if (failure := transcript.failure) is not None:
            transcript.story.failed(transcript, failure)
            transcript.meter.failed(failure.reason)
        else:
            transcript.story.finished(transcript)
            transcript.meter.ended(transcript)

    def _forget(self, transcript: Transcript) -> None:
        self._submissions.forget(transcript)
        self._unread.clear(transcript)

    def stopped(self, transcript: Transcript, answer: SequenceAnswer) -> None:
        """A stop string has ended a sequence that the scheduler may still run."""
        if self._registry.is_live(transcript):
            self._submissions.abort_sequence(transcript, answer)
            self._sequence_ended(transcript, answer)

    def _sequence_ended(self, transcript: Transcript, answer: SequenceAnswer) -> None:
        self._routes.remove(transcript, answer)
        if transcript.has_ended:
            self.retire(transcript)

    # The scheduler.

    def lost(self) -> None:
        """The scheduler is gone, or the connection to it. What it had is sent again when it is back."""
        self.metrics.scheduler_losses.add()
        self._submissions.lost()

    def received(self, progress: Progress) -> None:
        """Hands out one message of the scheduler."""
        if progress.facts is not None and self._outlet.takes_requests:
            self._submissions.send_all()
        for acceptance in progress.accepted:
            self._submissions.accepted(acceptance)
        for resumed in progress.resumed:
            self._submissions.resumed(resumed)
        for recovery in progress.recovered:
            if transcript := self._find_live(recovery.request_id):
                transcript.recover(Recovered(recovery.cause, recovery.num_replayed_tokens, recovery.exact))
        self._routes.apply(progress)
        # Behind the tokens that came before the end.
        for failure in progress.failed:
            self._submissions.failed(failure)
