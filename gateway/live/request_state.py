"""Holds one request and its answer so far: filled from one side, read by any number of readers.

Knows no connection: `live_requests` and `outstanding` apply the scheduler's messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from blockyard.contract.codec.pooling import FLOAT_BYTES
from blockyard.contract.events import Accepted, Finished, Recovered, Usage
from blockyard.contract.scheduling import Resubmission, SequenceError, SequenceRecord
from gateway.observe.request_log import TokenCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.sampling import PromptPiece
    from blockyard.contract.scheduling import Resumed, Submission
    from blockyard.errors import BlockyardError
    from gateway.live.answer import Ended, PromptAnswer, SequenceAnswer
    from gateway.observe.metrics import RequestMeter
    from gateway.observe.request_log import RequestLog


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request. `outlives_readers`: it runs on without readers. Times are the event loop's, in seconds.

    `is_known`: some scheduler accepted it before this gateway saw it. `front_state`: see GenerationRequest.
    """

    accepted: Accepted
    arrived_at: float
    outlives_readers: bool = False
    deadline_at: float | None = None
    is_known: bool = False
    front_state: bytes = b""


class Listener(Protocol):
    """A reader, which is woken when there is something new to read."""

    @property
    def is_patient(self) -> bool:
        """Whether new tokens do not wake it."""
        ...

    def wake(self) -> None: ...

    def on_recovered(self, event: Recovered) -> None:
        """Adds the event of a failure that the request survived."""
        ...


class RequestState:
    """One request and its answer so far.

    Attributes:
        submission: the request as it is sent to the scheduler.
        handle: the number under which the current scheduler was sent the request; 0 if it was not sent.
        has_waited: whether the request had to wait for a scheduler.
        is_accepted: whether a scheduler has queued the request, so that its readers may begin.
        error: why the request ended without a complete answer.
        determinism_id: the model's, without its adapter; empty once workers of different kinds have computed it.
        meter: measures it; set when it is adopted.
        request_log: its log line and its span.
    """

    def __init__(
        self,
        submission: Submission,
        origin: Origin,
        answers: Sequence[SequenceAnswer],
        *,
        determinism_id: str,
        request_log: RequestLog,
        prompt: PromptAnswer | None = None,
    ) -> None:
        self.submission = submission
        self.origin = origin
        self.answers = answers
        self.determinism_id = determinism_id
        self.request_log = request_log
        self.prompt = prompt
        self.handle = 0
        self.is_accepted = False
        self.has_waited = False
        self.num_cached_tokens = 0
        self.error: BlockyardError | None = None
        self.readers: list[Listener] = []
        self.meter: RequestMeter
        self._first_sequence_id = 0

    @property
    def wire_id(self) -> str:
        """Its name between gateways and scheduler."""
        return self.submission.request_id

    @property
    def was_accepted(self) -> bool:
        """Whether some scheduler has queued it, for this gateway or another."""
        return self.is_accepted or self.origin.is_known

    @property
    def has_ended(self) -> bool:
        return all(answer.ended is not None for answer in self.answers)

    @property
    def ends(self) -> list[Ended]:
        """The ends of those sequences that have one, by index."""
        return [answer.ended for answer in self.answers if answer.ended is not None]

    @property
    def failure(self) -> BlockyardError | None:
        """The error of a request of which each sequence has failed on its own; else None."""
        errors = [end.error for end in self.ends]
        return errors[0] if len(errors) == len(self.answers) and all(errors) else None

    @property
    def token_counts(self) -> TokenCounts:
        num_completion_tokens = sum(answer.num_tokens for answer in self.answers)
        num_prompt_tokens = len(self.submission.prompt_token_ids)
        return TokenCounts(num_prompt_tokens, self.num_cached_prompt_tokens, num_completion_tokens)

    @property
    def num_cached_prompt_tokens(self) -> int:
        """The number of cached prompt tokens, without virtual tokens before the prompt."""
        return max(self.num_cached_tokens - self.submission.num_virtual_tokens, 0)

    @property
    def weight(self) -> int:
        """The cost of keeping it, in tokens of 4 bytes; a log probability counts as one, a pooled number too."""
        submission = self.submission
        num_tokens = len(submission.prompt_token_ids) + sum(len(answer.token_ids) for answer in self.answers)
        # Tool schemas, grammars and a front's state may be larger than all tokens.
        texts = (submission.gateway_state, submission.sampling.grammar, self.origin.front_state)
        num_tokens += sum(map(len, texts)) // 4
        num_tokens += sum(len(end.pooled_values) for end in self.ends) // FLOAT_BYTES
        return num_tokens + sum(len(entry.token_ids) for answer in self.answers for entry in answer.logprobs)

    def sequence_id_of(self, answer: SequenceAnswer) -> int:
        """Returns the sequence id of one of its answers at the scheduler that accepted it last."""
        return self._first_sequence_id + answer.index

    # Events of the scheduler.

    def on_accepted(self, first_sequence_id: int) -> None:
        self._first_sequence_id = first_sequence_id
        self.is_accepted = True
        self.request_log.on_accepted()
        self.wake()

    def on_resumed(self, resumed: Resumed) -> None:
        """Continues from the scheduler's record of it."""
        self.num_cached_tokens = resumed.num_cached_tokens
        for piece in resumed.prompt_logprobs:
            self.add_prompt_piece(piece)
        self.take_records(resumed.sequences)
        self.on_accepted(resumed.first_sequence_id)

    def take_records(self, records: Sequence[SequenceRecord]) -> None:
        """Continues each sequence from a record, by index."""
        for answer, record in zip(self.answers, records, strict=True):
            answer.take_record(record)
            # Look for stop strings now: no further token may come that would trigger it.
            answer.advance()

    def advance(self) -> bool:
        """Turns all tokens into text and looks for stop strings; returns whether all sequences have ended."""
        for answer in self.answers:
            answer.advance()
        return self.has_ended

    def add_prompt_piece(self, piece: PromptPiece) -> None:
        if self.prompt is not None:
            self.prompt.add(piece)

    def on_recovered(self, event: Recovered) -> None:
        """Continues after a failure, behind the tokens that came before."""
        if not event.exact:
            # An answer that two different workers computed cannot be reproduced by either.
            self.determinism_id = ""
        self.request_log.on_recovered(event)
        for reader in self.readers:
            reader.on_recovered(event)

    def on_weights(self, version: str) -> None:
        """Continues with other weights, behind the tokens that came before."""
        for answer in self.answers:
            answer.note_weights(version)

    def make_accepted(self) -> Accepted:
        versions = self.answers[0].weight_versions
        return replace(self.origin.accepted, weight_version=versions[0][1]) if versions else self.origin.accepted

    def fail(self, error: BlockyardError) -> None:
        """Ends it with an error, which its readers get after the events that came before."""
        self.error = self.error or error
        self.wake()

    def wake(self) -> None:
        for reader in self.readers:
            reader.wake()

    # Messages.

    def make_finished_event(self, answer: SequenceAnswer) -> Finished:
        assert answer.ended is not None
        return Finished(
            index=answer.index,
            finish_reason=answer.ended.reason,
            matched_stop=answer.ended.matched,
            usage=Usage(
                num_prompt_tokens=self.origin.accepted.num_prompt_tokens,
                num_cached_tokens=self.num_cached_prompt_tokens,
                num_completion_tokens=answer.num_tokens,
                num_virtual_tokens=self.submission.num_virtual_tokens,
            ),
            determinism_id=self._identify(answer),
            weight_versions=answer.reported_versions,
            score=answer.ended.score,
            error=answer.ended.error,
        )

    def _identify(self, answer: SequenceAnswer) -> str:
        if len(answer.weight_versions) > 1:
            # An answer from two versions of weights cannot be reproduced with either.
            return ""
        adapter = self.submission.lora
        return adapter.identify(self.determinism_id) if adapter else self.determinism_id

    def make_recovered_event(self, cause: str, *, exact: bool) -> Recovered:
        """Makes the event of a scheduler that continues it from this gateway's record."""
        running = [answer for answer in self.answers if answer.ended is None]
        num_tokens = len(self.submission.prompt_token_ids) + sum(len(answer.token_ids) for answer in running)
        return Recovered(cause, num_tokens, exact)

    def make_resubmission(self, now: float) -> Resubmission | None:
        """Makes the record that a new scheduler continues from; None if no scheduler has accepted the request."""
        if not self.was_accepted:
            return None
        records = [_record_of(answer) for answer in self.answers]
        return Resubmission(now - self.origin.arrived_at, records, self.num_cached_tokens)


def _record_of(answer: SequenceAnswer) -> SequenceRecord:
    ended = answer.ended
    if ended is None:
        return SequenceRecord(answer.token_ids, None, answer.logprobs)
    error = SequenceError(str(ended.error.reason), ended.error.message) if ended.error else None
    return SequenceRecord(answer.token_ids, ended.reason, answer.logprobs, ended.score, error, ended.pooled_values)
