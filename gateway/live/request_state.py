"""Holds one request and its answer so far, for any number of readers.

Knows no connection: `live_requests` and `outstanding` apply the scheduler's messages to it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from blockyard.contract.codec.pooling import FLOAT_BYTES
from blockyard.contract.events import Accepted, Finished, Recovered, Usage
from blockyard.contract.sampling import PredictionUsage
from blockyard.contract.scheduling import Resubmission, Resumed, SequenceError, SequenceRecord, Submission
from gateway.observe.request_log import RequestLog, TokenCounts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.sampling import PromptPiece
    from blockyard.errors import BlockyardError
    from gateway.live.answer import Ended, PromptAnswer, SequenceAnswer
    from gateway.observe.metrics import RequestMeter


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a request. Times are those of the event loop, in seconds.

    Attributes:
        accepted: the event that its readers get first.
        arrived_at: the time of its arrival.
        outlives_readers: whether it continues without readers.
        deadline_at: the time of the client's deadline; None: no deadline.
        is_known: whether a scheduler had accepted it before it came to this gateway.
        front_state: see GenerationRequest.
    """

    accepted: Accepted
    arrived_at: float
    outlives_readers: bool = False
    deadline_at: float | None = None
    is_known: bool = False
    front_state: bytes = b""


class Listener(Protocol):
    """A reader, which is woken when there are new events to read."""

    @property
    def is_patient(self) -> bool:
        """Whether new tokens do not wake the reader."""
        ...

    def wake(self) -> None: ...

    def on_recovered(self, event: Recovered) -> None:
        """Adds the event of a failure that the request survived."""


class RequestState:
    """One request and its answer so far.

    Attributes:
        submission: the request as it is sent to the scheduler.
        handle: the request's number at the current scheduler; 0 if it was not sent.
        has_waited: whether the request had to wait for a scheduler.
        is_accepted: whether a scheduler has queued the request, so that its readers may begin.
        error: the error that ended the request without a complete answer; None: no error.
        determinism_id: the model's determinism id, without the adapter; empty once workers of different kinds have
            computed the answer.
        meter: the request's meter; set when the request is registered.
        request_log: the request's log and trace span.
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
        """The request's name between gateways and the scheduler."""
        return self.submission.request_id

    @property
    def was_accepted(self) -> bool:
        """Whether a scheduler has queued the request, for this gateway or another."""
        return self.is_accepted or self.origin.is_known

    @property
    def has_ended(self) -> bool:
        return all(answer.ended is not None for answer in self.answers)

    @property
    def ends(self) -> list[Ended]:
        """The ends of the sequences that have ended, in the order of their indexes."""
        return [answer.ended for answer in self.answers if answer.ended is not None]

    @property
    def failure(self) -> BlockyardError | None:
        """The first sequence's error if every sequence has failed on its own; else None."""
        errors = [end.error for end in self.ends]
        return errors[0] if len(errors) == len(self.answers) and all(errors) else None

    @property
    def _has_prediction(self) -> bool:
        return bool(self.submission.sampling.predicted_token_ids)

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
        """The memory for keeping the request, in units of a token's 4 bytes.

        A log probability and a pooled value count as one token each.
        """
        submission = self.submission
        num_tokens = len(submission.prompt_token_ids) + sum(len(answer.token_ids) for answer in self.answers)
        # Count the gateway's state (with tool schemas), the grammar and the front's state: they may exceed all tokens.
        texts = (submission.gateway_state, submission.sampling.grammar, self.origin.front_state)
        num_tokens += sum(map(len, texts)) // 4
        num_tokens += sum(len(end.pooled_values) for end in self.ends) // FLOAT_BYTES
        return num_tokens + sum(len(entry.token_ids) for answer in self.answers for entry in answer.logprobs)

    def sequence_id_of(self, answer: SequenceAnswer) -> int:
        """Returns the id of a sequence at the scheduler that last accepted the request."""
        return self._first_sequence_id + answer.index

    # Events of the scheduler.

    def on_accepted(self, first_sequence_id: int) -> None:
        """Continues at a scheduler that has the request as this gateway sent it."""
        for answer in self.answers:
            answer.expect_no_repeats()
        self._on_queued(first_sequence_id)

    def _on_queued(self, first_sequence_id: int) -> None:
        self._first_sequence_id = first_sequence_id
        self.is_accepted = True
        self.request_log.on_accepted()
        self.wake()

    def on_resumed(self, resumed: Resumed) -> None:
        """Continues from the scheduler's record of the request."""
        self.num_cached_tokens = resumed.num_cached_tokens
        for piece in resumed.prompt_logprobs:
            self.add_prompt_piece(piece)
        self.take_records(resumed.sequences)
        self._on_queued(resumed.first_sequence_id)

    def take_records(self, records: Sequence[SequenceRecord]) -> None:
        """Continues each sequence from its record; the records are in the order of the sequences."""
        for answer, record in zip(self.answers, records, strict=True):
            answer.take_record(record)
            # Look for stop strings now: perhaps no further token comes that would trigger the search.
            answer.advance()

    def advance(self) -> bool:
        """Detokenizes all tokens and looks for stop strings; returns whether all sequences have ended."""
        for answer in self.answers:
            answer.advance()
        return self.has_ended

    def add_prompt_piece(self, piece: PromptPiece) -> None:
        if self.prompt is not None:
            self.prompt.add(piece)

    def on_recovered(self, event: Recovered) -> None:
        """Notifies the readers that the request continues after a failure."""
        if not event.exact:
            # An answer that two different workers computed cannot be reproduced by either.
            self.determinism_id = ""
        self.request_log.on_recovered(event)
        for reader in self.readers:
            reader.on_recovered(event)

    def on_weights(self, version: str) -> None:
        """Records that the next tokens are computed with weights of this version."""
        for answer in self.answers:
            answer.note_weights(version)

    def make_accepted(self) -> Accepted:
        versions = self.answers[0].weight_versions
        return replace(self.origin.accepted, weight_version=versions[0][1]) if versions else self.origin.accepted

    def fail(self, error: BlockyardError) -> None:
        """Ends the request with an error, which its readers get after all earlier events."""
        self.error = self.error or error
        self.wake()

    def wake(self) -> None:
        for reader in self.readers:
            reader.wake()

    # Events for readers, and the record for a scheduler.

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
                prediction=(answer.prediction or PredictionUsage()) if self._has_prediction else None,
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
        """Makes the event for a scheduler that continues the request from this gateway's record."""
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
        return SequenceRecord(answer.token_ids, None, answer.logprobs, prediction=answer.prediction)
    error = SequenceError(str(ended.error.reason), ended.error.message) if ended.error else None
    return SequenceRecord(
        answer.token_ids, ended.reason, answer.logprobs, ended.score, error, ended.pooled_values, answer.prediction
    )
