"""Collects the tokens of one sequence and turns them into text. Knows neither the scheduler nor the client.

New tokens are only collected. They are detokenized when a reader asks for text, so that tokens which arrived meanwhile
merge into one delta. A sequence with stop strings is also detokenized without a reader, once more than
`MAX_UNREAD_TOKENS` wait: otherwise, a client that does not read could keep a sequence running past its stop string.

The text depends only on the tokens and the stop rules, not on how the tokens were grouped. All text is kept, since any
number of readers may read it, each from its own position.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.events import Delta, PromptLogprobs, TokenLogprobs
from blockyard.contract.sampling import Candidates, FinishReason, PredictionUsage, PromptPiece, StopCriteria
from blockyard.errors import BlockyardError, Reason
from gateway.text.stop_strings import Match, StopStringMatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blockyard.contract.scheduling import SequenceError, SequenceRecord
    from gateway.dialects.answer_parser import AnswerParser
    from gateway.text.detokenizer import Detokenizer, TokenTexts

# The most tokens of a sequence with stop strings that may wait for a reader.
MAX_UNREAD_TOKENS = 16


class AnswerRules(NamedTuple):
    """The rules that all sequences of a request follow.

    Attributes:
        stop: the request's stop criteria.
        end_token_ids: the model's end tokens; empty if the request ignores them.
        stop_token_ids: all ids that end a sequence, including `end_token_ids`.
        return_token_ids: whether deltas have token ids.
        logprobs: makes log probabilities; None: not requested.
        parsers: makes the parser of a sequence from its index; None: the answer is not parsed.
    """

    stop: StopCriteria
    end_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    return_token_ids: bool
    logprobs: TokenTexts | None = None
    parsers: Callable[[int], AnswerParser] | None = None


class Ended(NamedTuple):
    """The end of an answer.

    Attributes:
        reason: why the answer ended.
        matched: the stop string or the request's stop token that ended it; None: neither.
        score: the score of a beam; None without a beam search.
        error: the error, if the reason is ERROR.
        pooled_values: the values pooled from the prompt, if requested: float32, little endian.
    """

    reason: FinishReason
    matched: str | int | None
    score: float | None = None
    error: BlockyardError | None = None
    pooled_values: bytes = b""


class Place(NamedTuple):
    num_tokens: int
    num_text_bytes: int


class SequenceAnswer:
    """Collects the tokens of one sequence, and returns its text and tokens after a position.

    Attributes:
        token_ids: all tokens so far; the tokens from `num_tokens` on are not detokenized yet.
        num_tokens: the number of tokens that are detokenized.
        text: the text so far, complete characters in UTF-8.
        logprobs: if requested, an entry for each of `token_ids`.
        ended: the end; None while the sequence runs.
        prediction: what became of the drafts that the request's prediction says; None: there were none.
        weight_versions: pairs of a token's index and the version of the weights that computed the tokens from it on.
    """

    def __init__(self, index: int, rules: AnswerRules, detokenizer: Detokenizer) -> None:
        self.index = index
        self.token_ids = array("I")
        self.num_tokens = 0
        self.text = bytearray()
        self.logprobs: list[Candidates] = []
        self.ended: Ended | None = None
        self.prediction: PredictionUsage | None = None
        self.weight_versions: list[tuple[int, str]] = []
        self._rules = rules
        self._detokenizer = detokenizer
        self._matcher: StopStringMatcher | None = None
        if rules.stop.stop_strings:
            self._matcher = StopStringMatcher(
                rules.stop.stop_strings, include_in_output=rules.stop.include_stop_in_output
            )
        self._min_tokens = rules.stop.min_tokens or 0
        # The last piece of the text and its offset: a reader that keeps up only needs this piece.
        self._piece, self._piece_start = "", 0
        # The numbers of tokens, and of their log probabilities, that the scheduler will send again.
        self._num_repeats = 0
        self._num_repeated_logprobs = 0

    @property
    def looks_for_stops(self) -> bool:
        return self._matcher is not None

    def make_parser(self) -> AnswerParser | None:
        """Makes a parser that parses the answer from its beginning; None if the answer is plain text."""
        return self._rules.parsers(self.index) if self._rules.parsers else None

    def push(self, token_id: int) -> bool:
        """Adds a token; returns whether a stop string has been found, which ends the answer."""
        if self._num_repeats:
            self._num_repeats -= 1
            return False
        token_ids = self.token_ids
        token_ids.append(token_id)
        if self._matcher is None or len(token_ids) - self.num_tokens <= MAX_UNREAD_TOKENS:
            return False
        # Leave out the last token: it may be a stop token, whose text is not searched. A later message decides.
        self._advance_to(len(token_ids) - 1)
        return self.ended is not None

    def push_logprobs(self, candidates: Candidates) -> None:
        """Adds the log probabilities of the first token that still lacks them."""
        if self._num_repeated_logprobs:
            self._num_repeated_logprobs -= 1
        elif self.ended is None:
            self.logprobs.append(candidates)

    def note_weights(self, version: str) -> None:
        """Records the version of the weights that compute the next tokens."""
        if self.ended is not None or (self.weight_versions and self.weight_versions[-1][1] == version):
            return
        place = len(self.token_ids)
        if self.weight_versions and self.weight_versions[-1][0] == place:
            self.weight_versions.pop()
        self.weight_versions.append((place, version))

    @property
    def reported_versions(self) -> tuple[tuple[int, str], ...]:
        """The weight versions to report; empty if the model's weights are unversioned."""
        used = tuple((place, version) for place, version in self.weight_versions if place < max(self.num_tokens, 1))
        return used if any(version for _, version in used) else ()

    def finish(
        self,
        reason: FinishReason,
        score: float | None = None,
        error: SequenceError | None = None,
        pooled_values: bytes = b"",
    ) -> None:
        """Ends the answer after the last pushed token, as the scheduler reported."""
        if self.ended is None:
            failure = _make_error(error) if reason is FinishReason.ERROR else None
            self._finish(reason, score, failure, pooled_values)

    def advance(self) -> bool:
        """Detokenizes all tokens; returns whether a stop string was found, which ends the answer."""
        if self.ended is None and len(self.token_ids) > self.num_tokens:
            self._advance_to(len(self.token_ids))
            return self.ended is not None
        return False

    def take_record(self, record: SequenceRecord) -> None:
        """Continues from the scheduler's record of the sequence, which may have more or fewer tokens than are here."""
        num_known, num_recorded = len(self.token_ids), len(record.token_ids)
        self.prediction = record.prediction
        if self.ended is None:
            self.token_ids.extend(record.token_ids[num_known:])
            self.logprobs.extend(record.logprobs[len(self.logprobs) :])
        self._num_repeats = max(0, num_known - num_recorded)
        self._num_repeated_logprobs = max(0, len(self.logprobs) - len(record.logprobs))
        if record.reason is not None:
            self.finish(record.reason, record.score, record.error, record.pooled_values)

    def expect_no_repeats(self) -> None:
        """Continues from the tokens that are here, which the scheduler has been sent."""
        self._num_repeats = self._num_repeated_logprobs = 0

    def delta_after(self, num_tokens: int, num_text_bytes: int, until: Place | None = None) -> Delta | None:
        """Returns the text and tokens from a position up to `until`, or up to the end; None if there are none."""
        rules, end_tokens, end_bytes = self._rules, self.num_tokens, len(self.text)
        if until is not None:
            end_tokens, end_bytes = until
        has_tokens = end_tokens > num_tokens and (rules.return_token_ids or rules.logprobs is not None)
        if end_bytes <= num_text_bytes and not has_tokens:
            return None
        token_ids = tuple(self.token_ids[num_tokens:end_tokens]) if rules.return_token_ids else ()
        logprobs = ()
        if rules.logprobs is not None:
            logprobs = tuple(map(rules.logprobs.logprobs_of, self.logprobs[num_tokens:end_tokens]))
        if num_text_bytes == self._piece_start and until is None:
            text = self._piece
        else:
            text = self.text[num_text_bytes:end_bytes].decode()
        return Delta(self.index, text, token_ids, end_tokens, end_bytes, logprobs)

    def _advance_to(self, end: int) -> None:
        token_ids = self.token_ids[self.num_tokens : end]
        if self._matcher is None:
            self.num_tokens = end
            self._release(self._detokenizer.push(token_ids))
            return
        # One by one, since tokens after the one that completes a stop string do not count.
        for token_id in token_ids:
            self.num_tokens += 1
            self._search(self._matcher, self._detokenizer.push([token_id]))
            if self.ended is not None:
                return

    def _search(self, matcher: StopStringMatcher, text: str) -> None:
        if not text:
            return
        found = matcher.push(text, may_match=self.num_tokens > self._min_tokens)
        if isinstance(found, Match):
            self._release(found.text)
            self._end(Ended(FinishReason.STOP, found.stop_string))
        else:
            self._release(found)

    def _release(self, text: str) -> None:
        if text:
            self._piece, self._piece_start = text, len(self.text)
            self.text += text.encode()

    def _end(self, ended: Ended) -> None:
        self.ended = ended
        del self.token_ids[self.num_tokens :]
        del self.logprobs[self.num_tokens :]

    def _finish(
        self, reason: FinishReason, score: float | None, error: BlockyardError | None, pooled_values: bytes
    ) -> None:
        stop_token_id = self._stop_token_id() if reason is FinishReason.STOP else None
        is_hidden = stop_token_id is not None and not self._rules.stop.include_stop_in_output
        self._advance_to(len(self.token_ids) - is_hidden)
        if self.ended is None:
            self._flush()
        if self.ended is not None:
            return
        self.num_tokens = len(self.token_ids)
        is_end_token = stop_token_id in self._rules.end_token_ids
        self._end(Ended(reason, None if is_end_token else stop_token_id, score, error, pooled_values))

    def _stop_token_id(self) -> int | None:
        """Returns the last token if it is a stop token; None otherwise, for example after a stop string."""
        last: Sequence[int] = self.token_ids[-1:]
        return last[0] if last and last[0] in self._rules.stop_token_ids else None

    def _flush(self) -> None:
        rest = self._detokenizer.flush()
        if self._matcher is None:
            self._release(rest)
            return
        self._search(self._matcher, rest)
        if self.ended is None:
            self._release(self._matcher.flush())


def _make_error(error: SequenceError | None) -> BlockyardError:
    """Makes the error of a failed sequence. A scheduler of another version may send no error."""
    if error is None:
        return BlockyardError(Reason.BUG, "the sequence failed; the scheduler's log has more")
    return BlockyardError(Reason(error.reason), error.message)


class PromptAnswer:
    """Collects the pieces of a prompt's log probabilities, in any order and possibly repeated, and makes one event."""

    def __init__(self, num_prompt_tokens: int, texts: TokenTexts, num_virtual_tokens: int = 0) -> None:
        """`num_virtual_tokens`: the number of tokens before the prompt, which count in the pieces' positions."""
        # The first token has no log probabilities.
        self._first_position = num_virtual_tokens + 1
        self._entries: list[Candidates | None] = [None] * (num_prompt_tokens - 1)
        self._texts = texts

    def add(self, piece: PromptPiece) -> None:
        start = piece.first_position - self._first_position
        self._entries[start : start + len(piece.candidates)] = piece.candidates

    def make_event(self) -> PromptLogprobs | None:
        """Makes the event with the whole prompt's log probabilities; None while some are missing."""
        known = [entry for entry in self._entries if entry is not None]
        if len(known) < len(self._entries):
            return None
        return PromptLogprobs((TokenLogprobs(None), *map(self._texts.logprobs_of, known)))
