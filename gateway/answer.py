"""The answer of one sequence: its tokens become text, deltas and an end. Knows neither the scheduler nor the client.

Tokens are only collected when they come. The text is made when somebody takes it, so that what came meanwhile merges
into one delta. With stop strings, text is made without anybody asking once more than `MAX_UNREAD_TOKENS` wait: a client
that does not read must not keep a sequence alive whose end has been written.

Which text is returned is a function of the tokens and the stop rules alone, however the tokens were grouped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gateway.request import Delta, FinishReason
from gateway.stop_strings import Match, StopStringMatcher

if TYPE_CHECKING:
    from gateway.detokenizer import Detokenizer
    from gateway.request import StopOptions

# Tokens of a sequence with stop strings that may wait for the client to read.
MAX_UNREAD_TOKENS = 16


class AnswerRules(NamedTuple):
    """What the sequences of a request have in common."""

    stop: StopOptions
    end_token_ids: frozenset[int]
    return_token_ids: bool


class Ended(NamedTuple):
    """How an answer ended. `matched`: the stop string, the request's stop token, or None."""

    reason: FinishReason
    matched: str | int | None


class SequenceAnswer:
    """Collects the tokens of one sequence and gives them out as deltas."""

    def __init__(self, index: int, rules: AnswerRules, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.ended: Ended | None = None
        self._rules = rules
        self._detokenizer = detokenizer
        self._matcher: StopStringMatcher | None = None
        if rules.stop.stop_strings:
            self._matcher = StopStringMatcher(
                rules.stop.stop_strings, include_in_output=rules.stop.include_stop_in_output
            )
        self._min_tokens = rules.stop.min_tokens or 0
        # Came in, but is not text yet.
        self._pending: list[int] = []
        # Is text or an id to return, but was not taken yet.
        self._texts: list[str] = []
        self._untaken_token_ids: list[int] = []
        self._num_text_bytes = 0

    def push(self, token_id: int) -> bool:
        """Takes a token; tells whether a stop string has been found, which ends the answer."""
        pending = self._pending
        pending.append(token_id)
        if self._matcher is None or len(pending) <= MAX_UNREAD_TOKENS:
            return False
        # The last one may be a stop token, whose text is not looked at; its own message will say.
        self._advance(pending[:-1])
        if self.ended is None:
            self._pending = pending[-1:]
        return self.ended is not None

    def finish(self, reason: FinishReason) -> None:
        """Takes the scheduler's word that the sequence ended with the token pushed last."""
        if self.ended is None:
            self._finish(reason)

    def advance(self) -> bool:
        """Makes text of what came in; tells whether a stop string has been found, which ends the answer."""
        if self.ended is None and self._pending:
            pending, self._pending = self._pending, []
            self._advance(pending)
            return self.ended is not None
        return False

    def take(self) -> Delta | None:
        """Returns what is new since the last call, after `advance`; None if nothing is."""
        if not (self._texts or self._untaken_token_ids):
            return None
        text = "".join(self._texts)
        token_ids = tuple(self._untaken_token_ids)
        self._texts.clear()
        self._untaken_token_ids.clear()
        self._num_text_bytes += len(text) if text.isascii() else len(text.encode())
        return Delta(self.index, text, token_ids, self.num_tokens, self._num_text_bytes)

    def _advance(self, token_ids: list[int]) -> None:
        if self._matcher is None:
            self._count(token_ids)
            self._release(self._detokenizer.push(token_ids))
            return
        # One by one, since the tokens after the one that completes a stop string do not count.
        for token_id in token_ids:
            self._count([token_id])
            self._search(self._matcher, self._detokenizer.push([token_id]))
            if self.ended is not None:
                self._pending = []
                return

    def _count(self, token_ids: list[int]) -> None:
        self.num_tokens += len(token_ids)
        if self._rules.return_token_ids:
            self._untaken_token_ids.extend(token_ids)

    def _search(self, matcher: StopStringMatcher, text: str) -> None:
        if not text:
            return
        found = matcher.push(text, may_match=self.num_tokens > self._min_tokens)
        if isinstance(found, Match):
            self._release(found.text)
            self.ended = Ended(FinishReason.STOP, found.stop_string)
        else:
            self._release(found)

    def _release(self, text: str) -> None:
        if text:
            self._texts.append(text)

    def _finish(self, reason: FinishReason) -> None:
        pending, self._pending = self._pending, []
        stop_token_id = pending[-1] if reason is FinishReason.STOP and pending else None
        has_hidden_end = stop_token_id is not None and not self._rules.stop.include_stop_in_output
        self._advance(pending[:-1] if has_hidden_end else pending)
        if self.ended is None:
            self._flush()
        if self.ended is not None:
            return
        if has_hidden_end:
            self._count(pending[-1:])
        is_end_token = stop_token_id in self._rules.end_token_ids
        self.ended = Ended(reason, None if is_end_token else stop_token_id)

    def _flush(self) -> None:
        rest = self._detokenizer.flush()
        if self._matcher is None:
            self._release(rest)
            return
        self._search(self._matcher, rest)
        if self.ended is None:
            self._release(self._matcher.flush())
