"""Builds a whole answer from the events of its stream."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from blockyard.client.results import (
    Accepted,
    Choice,
    Completion,
    Delta,
    Event,
    Finished,
    PromptLogprobs,
    Recovered,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
)


@dataclass(slots=True)
class _Parts:
    """The parts of one sequence that have come."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict[int, list[ToolCallDelta]])

    def add(self, delta: Delta) -> None:
        self.reasoning.append(delta.reasoning_text)
        for piece in delta.tool_calls:
            self.calls.setdefault(piece.index, []).append(piece)
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


@dataclass(slots=True)
class CompletionBuilder:
    """Builds a completion from the events of a stream."""

    accepted: Accepted | None = None
    _prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    _parts: defaultdict[int, _Parts] = field(default_factory=lambda: defaultdict[int, _Parts](_Parts))
    _finished: dict[int, Finished] = field(default_factory=dict[int, Finished])

    def add(self, event: Event) -> None:
        """Takes the next event."""
        match event:
            case Accepted():
                self.accepted = event
            case PromptLogprobs():
                self._prompt_logprobs = event.logprobs
            case Delta():
                self._parts[event.index].add(event)
            case Finished():
                self._finished[event.index] = event
            case Recovered():
                pass

    def build(self) -> Completion:
        """Makes the answer of a stream that has ended."""
        if self.accepted is None or not self._finished:
            raise ValueError("the stream has not ended: there is no whole answer yet")
        choices = tuple(self._make_choice(self._finished[index]) for index in sorted(self._finished))
        accepted, last = self.accepted, next(reversed(self._finished.values()))
        return Completion(
            accepted.request_id,
            accepted.model,
            accepted.seed,
            choices,
            last.determinism_id,
            self._prompt_logprobs,
            accepted.warnings,
        )

    def _make_choice(self, finished: Finished) -> Choice:
        parts = self._parts[finished.index]
        return Choice(
            finished.index,
            "".join(parts.texts),
            tuple(parts.token_ids),
            finished.finish_reason,
            finished.matched_stop,
            finished.usage,
            tuple(parts.logprobs),
            finished.score,
            finished.error,
            tuple(
                ToolCall(pieces[0].name, "".join(piece.arguments for piece in pieces), pieces[0].id)
                for pieces in parts.calls.values()
            ),
            "".join(parts.reasoning),
            finished.calls_tools,
        )
