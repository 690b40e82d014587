"""What a client was told of one request, and whether it was told each thing once and in order."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blockyard.contract.events import Accepted, Delta, Finished, Loading, Recovered
from blockyard.contract.sampling import PredictionUsage

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from blockyard.contract.events import Event


@dataclass(slots=True)
class Sequence:
    """One of a request's sequences: what is equal however the request was run.

    Attributes:
        end: finish reason, matched stop and number of tokens; None before it has ended.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    end: tuple[str, str | int | None, int] | None = None


@dataclass(slots=True)
class Transcript:
    """The events of one request, checked as they come.

    Attributes:
        sequences: by index.
        recoveries: `Recovered` events.
        first_token_seconds: from the beginning to the first delta.
        longest_gap_seconds: between two deltas.
        longest_gap_at: when that ended, by time.monotonic().
        num_resumes: times that the client read on elsewhere.
        is_accepted: whether the first event has come.
        prediction: what became of drafts that the request predicts, in all sequences.
    """

    sequences: dict[int, Sequence] = field(default_factory=dict[int, Sequence])
    recoveries: list[Recovered] = field(default_factory=list[Recovered])
    first_token_seconds: float = 0.0
    longest_gap_seconds: float = 0.0
    longest_gap_at: float = 0.0
    num_resumes: int = 0
    is_accepted: bool = False
    prediction: PredictionUsage = field(default_factory=PredictionUsage)
    _last_at: float = field(default_factory=time.monotonic)

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(len(sequence.token_ids) for sequence in self.sequences.values())

    def take(self, event: Event) -> None:
        """Takes the next event. Raises AssertionError where it does not follow the ones before."""
        if isinstance(event, Loading):
            return
        assert self.is_accepted != isinstance(event, Accepted), f"accepted comes first and once; came {event}"
        match event:
            case Accepted():
                self.is_accepted = True
            case Delta():
                self._add(event)
            case Finished():
                self._finish(event)
            case Recovered():
                self.recoveries.append(event)
            case _:
                pass

    def _time(self) -> None:
        now = time.monotonic()
        seconds, self._last_at = now - self._last_at, now
        if not self.num_tokens:
            self.first_token_seconds = seconds
        elif seconds > self.longest_gap_seconds:
            self.longest_gap_seconds, self.longest_gap_at = seconds, now

    def _add(self, delta: Delta) -> None:
        self._time()
        sequence = self.sequences.setdefault(delta.index, Sequence())
        assert sequence.end is None, f"sequence {delta.index} goes on after its end: {delta}"
        sequence.text += delta.text
        sequence.token_ids += delta.token_ids
        sequence.logprobs += getattr(delta, "logprobs", ())
        assert delta.num_tokens == len(sequence.token_ids), f"a token is lost or came twice: {delta}"
        assert delta.num_text_bytes == len(sequence.text.encode()), f"text is lost or came twice: {delta}"

    def _finish(self, finished: Finished) -> None:
        sequence = self.sequences.setdefault(finished.index, Sequence())
        assert sequence.end is None, f"sequence {finished.index} ends twice"
        self.prediction = self.prediction.plus(*finished.usage.prediction or ())
        sequence.end = (finished.finish_reason, finished.matched_stop, finished.usage.num_completion_tokens)


async def read(events: AsyncIterable[Event], transcript: Transcript) -> None:
    """Reads a stream to its end. Raises AssertionError where anything came twice, or not at all."""
    async for event in events:
        transcript.take(event)
    unfinished = [index for index, sequence in transcript.sequences.items() if sequence.end is None]
    assert transcript.sequences and not unfinished, f"sequences {unfinished} have no end"


def difference(found: Transcript, expected: Transcript) -> str:
    """Says where two answers differ first; empty where they are equal."""
    if found.sequences.keys() != expected.sequences.keys():
        return f"sequences {sorted(found.sequences)}, where {sorted(expected.sequences)} were due"
    for index, due in sorted(expected.sequences.items()):
        came = found.sequences[index]
        pairs = enumerate(zip(came.token_ids, due.token_ids, strict=False))
        position = next((position for position, (left, right) in pairs if left != right), None)
        if position is not None:
            came_id, due_id = came.token_ids[position], due.token_ids[position]
            return f"sequence {index}: token {position} is {came_id}, where {due_id} was due"
        for name in ("text", "token_ids", "logprobs", "end"):
            if getattr(came, name) != getattr(due, name):
                return f"sequence {index}: {name} {getattr(came, name)!r:.200}, due {getattr(due, name)!r:.200}"
    return ""
