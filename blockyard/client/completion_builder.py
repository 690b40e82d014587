"""Builds a whole answer from the events of its stream."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from blockyard.client.results import Choice, Completion
from blockyard.contract.events import (
    Accepted,
    Delta,
    Event,
    Finished,
    PromptLogprobs,
    Recovered,
    TokenLogprobs,
    join_calls,
)


@dataclass(slots=True)
class CompletionBuilder:
    accepted: Accepted | None = None
    _prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    _deltas: defaultdict[int, list[Delta]] = field(default_factory=lambda: defaultdict[int, list[Delta]](list))
    _finished: dict[int, Finished] = field(default_factory=dict[int, Finished])

    def add(self, event: Event) -> None:
        match event:
            case Accepted():
                self.accepted = event
            case PromptLogprobs():
                self._prompt_logprobs = event.logprobs
            case Delta():
                self._deltas[event.index].append(event)
            case Finished():
                self._finished[event.index] = event
            case Recovered():
                pass

    def build(self) -> Completion:
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
        deltas = self._deltas[finished.index]
        return Choice(
            finished.index,
            "".join(delta.text for delta in deltas),
            tuple(token_id for delta in deltas for token_id in delta.token_ids),
            finished.finish_reason,
            finished.matched_stop,
            finished.usage,
            tuple(entry for delta in deltas for entry in delta.logprobs),
            finished.score,
            finished.error,
            join_calls(deltas),
            "".join(delta.reasoning_text for delta in deltas),
            finished.calls_tools,
        )
