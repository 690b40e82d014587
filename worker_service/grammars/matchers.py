"""The states of sequences in their grammars, which depend only on the grammar and the output.

A thread makes a sequence's matcher as soon as the sequence's first step is decoded. The thread that makes masks
advances the matcher by the new tokens before the next mask; the device thread only records these tokens. Knows no
tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from blockyard.errors import BlockyardError, Reason
from blockyard.grammars.limits import (
    HINT,
    MAX_GRAMMAR_BYTES,
    full_size,
    is_dead_end,
    is_limit,
    is_panic,
    library_version,
    parser_limits,
)
from blockyard.grammars.threads import make_executor
from blockyard.model_config.fields import read_object
from blockyard.panics import ExtensionPanic, panics_as_errors
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    import numpy.typing as npt
    from llguidance import LLMatcher, LLTokenizer

    from worker_service.models.loader import RunnableModel

    Words = npt.NDArray[np.uint32]
    Ids = npt.NDArray[np.int64]
    Bits = tuple[Ids, Words]

log = EventLogger(__name__)


def read_vocabulary(folder: Path, vocab_size: int) -> LLTokenizer:
    """Reads tokenizer.json. Ids that only the tokenizer or only the model has are never allowed.

    Raises BlockyardError FEATURE_DISABLED, which names the missing file or feature.
    """
    if not library_version():
        raise _disabled(f"this worker cannot compile grammars: {HINT}")
    from llguidance import LLTokenizer  # noqa: PLC0415  an extra

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise _disabled(f"grammars need the model's tokenizer.json, and {folder} on the worker has none")
    ends = sorted(token_id for token_id in _end_ids(folder) if token_id < vocab_size)
    problem = None
    # The tokenizer may have more ids than the model, and the model may have end tokens that the tokenizer lacks.
    for n_vocab, eos_token in ((vocab_size, ends or None), (None, ends or None), (vocab_size, None), (None, None)):
        try:
            with panics_as_errors():
                return LLTokenizer(str(file), n_vocab=n_vocab, eos_token=eos_token)
        except (ValueError, ExtensionPanic) as error:
            problem = error
    raise _disabled(f"{file} cannot be used for grammars: {problem}")


def _end_ids(folder: Path) -> set[int]:
    """Returns the end token ids in config.json and generation_config.json; llguidance needs at least one."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        value = read_object(folder / name).get("eos_token_id") if (folder / name).exists() else None
        ids = value if isinstance(value, list) else [value]
        found.update(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)
    return found


def _disabled(message: str) -> BlockyardError:
    return BlockyardError(Reason.FEATURE_DISABLED, message)


WORD_BITS = 32

# Grammars that are kept compiled: requests of one application have the same few.
_MAX_COMPILED = 64

# The most memory for all compiled grammars; usual schemas never reach it.
_MAX_COMPILED_BYTES = 1024 * 1024 * 1024

_MAX_COMPLAINT = 300


class Grammars:
    """The grammars of one model's sequences, and the threads that work on them."""

    def __init__(self, vocabulary: LLTokenizer | BlockyardError, vocab_size: int) -> None:
        """`vocabulary`: the vocabulary, or the error with which sequences with a grammar fail."""
        self._vocabulary = vocabulary
        self._num_words = -(-vocab_size // WORD_BITS)
        self._compilers = make_executor(2, "grammars")
        self._masker = make_executor(1, "masks")
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._lock = Lock()

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """Starts to compile a grammar, unless it was started before. Any thread may call this."""
        with self._lock:
            found = self._compiled.pop(grammar, None)
            if found is None:
                found, self._sizes[grammar] = self._compilers.submit(self._compile, grammar), full_size(grammar)
            self._compiled[grammar] = found
            while len(self._compiled) > 1 and self._has_too_many():
                del self._sizes[self._compiled.popitem(last=False)[0]]
        return found

    def _has_too_many(self) -> bool:
        return len(self._compiled) > _MAX_COMPILED or sum(self._sizes.values()) > _MAX_COMPILED_BYTES

    def _compile(self, grammar: str) -> LLMatcher:
        """Compiles a grammar; raises BlockyardError."""
        if isinstance(self._vocabulary, BlockyardError):
            raise self._vocabulary
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415  an extra

        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise BlockyardError(Reason.GRAMMAR_TOO_COMPLEX, f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes")
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=LLParserLimits(**parser_limits(grammar)))
        if matcher.is_error():
            raise _refusal(matcher, Reason.FIELD_INVALID)
        return matcher

    def follow(self, grammar: str, output: Ids, stop_token_ids: Ids) -> GrammarState:
        """Returns the state of a sequence that has this output and ends with any of `stop_token_ids`."""
        compiled = self.prepare(grammar)
        renew = partial(self._renew, grammar, compiled)
        return GrammarState(compiled, renew, output.tolist(), self._find_ends(stop_token_ids))

    def _renew(self, grammar: str, spent: Future[LLMatcher]) -> LLMatcher:
        """Compiles a grammar again for one row, after the shared compiled grammar has reached a limit."""
        with self._lock:
            if self._compiled.get(grammar) is spent:
                del self._compiled[grammar], self._sizes[grammar]
        return self._compile(grammar)

    def _find_ends(self, stop_token_ids: Ids) -> Ends:
        vocabulary = self._vocabulary
        if isinstance(vocabulary, BlockyardError):
            return Ends(frozenset(), NO_BITS, NO_BITS, NO_BITS)
        ids = stop_token_ids.tolist()
        plain = [each for each in ids if each < vocabulary.vocab_size and not vocabulary.is_special_token(each)]
        own = [each for each in vocabulary.eos_tokens if each < WORD_BITS * self._num_words]
        return Ends(frozenset(ids), bits_of(ids), bits_of(plain), bits_of(own))

    def begin_masks(self, states: Sequence[tuple[int, GrammarState]]) -> Masks:
        """Begins to make the masks of rows in another thread. `states`: by the row's place in the step."""
        words = np.zeros((len(states), self._num_words), np.uint32)
        return Masks(np.array([row for row, _ in states], np.int64), words, self._masker.submit(_fill, states, words))


def make_grammars(loaded: RunnableModel) -> Grammars | None:
    """Reads a model's vocabulary (about 35 MB and 0.2 s per 50,000 tokens); None if the model does not sample."""
    if loaded.config.pooling is not None or not loaded.parallel.is_sampling_rank:
        return None
    vocab_size = loaded.config.vocab_size
    try:
        return Grammars(read_vocabulary(loaded.folder, vocab_size), vocab_size)
    except BlockyardError as error:
        return Grammars(error, vocab_size)


def _fill(states: Sequence[tuple[int, GrammarState]], words: Words) -> None:
    for (_, state), row in zip(states, words, strict=True):
        state.fill(row)


class Ends(NamedTuple):
    """The ids that end a sequence, and mask bits: of `all` end ids, of end ids that are `plain` text, and of
    llguidance's `own` end ids, which it sets where the grammar may end."""

    token_ids: frozenset[int]
    all: Bits
    plain: Bits
    own: Bits


class GrammarState:
    def __init__(
        self, compiled: Future[LLMatcher], renew: Callable[[], LLMatcher], token_ids: list[int], ends: Ends
    ) -> None:
        self._compiled = compiled
        self._renew = renew
        self._matcher: LLMatcher | None = None
        self._token_ids = token_ids
        self._num_consumed = 0
        # The mask behind these tokens, once it was made.
        self._last_mask: Words | None = None
        self._ends = ends
        self.failure: BlockyardError | None = None
        """The reason why no token is allowed any more."""

    def add(self, token_id: int) -> None:
        self._token_ids.append(token_id)

    def copy(self) -> GrammarState:
        """Makes the state of a fork. No mask of this one may be on its way."""
        twin = GrammarState(self._compiled, self._renew, list(self._token_ids), self._ends)
        twin.failure = self.failure
        if self._matcher is None:
            return twin
        # A twin without a matcher takes the compiled grammar's, and is moved on by all of its tokens.
        with suppress(ExtensionPanic), panics_as_errors():
            twin._matcher = self._matcher.deep_copy()
            twin._num_consumed, twin._last_mask = self._num_consumed, self._last_mask
        return twin

    def fill(self, words: Words) -> None:
        """Writes the mask of the next token: a bit for each id, set if the id is allowed.

        If the grammar cannot be followed, all bits stay 0 and `failure` has the reason.
        """
        try:
            if self.failure is None:
                with panics_as_errors():
                    self._fill(words)
        except BlockyardError as error:
            # Rows with the same grammar share the error, so it must not keep a row's traceback and frames alive.
            self.failure = error.with_traceback(None)
        except Exception:  # must not end the step of others
            log.exception("a grammar failed")
            self.failure = _make_failure()
        if self.failure is not None:
            words[:] = 0

    def _fill(self, words: Words) -> None:
        self._matcher = self._matcher or self._compiled.result().deep_copy()
        try:
            self._advance(self._matcher, words)
        except BlockyardError as error:
            if error.reason is not Reason.GRAMMAR_TOO_COMPLEX:
                raise
            # Copies of a matcher share a lexer, which the texts of other rows may have brought to its limits.
            self._matcher, self._num_consumed, self._last_mask = self._renew(), 0, None
            self._advance(self._matcher, words)

    def forced_token_ids(self, most: int, vocab_size: int) -> list[int]:
        """Returns the tokens that the grammar leaves no choice about, as it would divide their text.

        No mask may be on its way. The state stays as it is: what it costs to follow the grammar is the same.
        """
        if self._matcher is None or self.failure is not None:
            return []
        # A matcher that fails here fails again at the next mask, which says why.
        with suppress(BlockyardError, ExtensionPanic), panics_as_errors():
            self._consume(self._matcher)
            ids = self._matcher.compute_ff_tokens()[:most]
            return ids if max(ids, default=0) < vocab_size else []
        return []

    def _consume(self, matcher: LLMatcher) -> None:
        """Moves a matcher on by the tokens that it lacks."""
        for token_id in self._token_ids[self._num_consumed :]:
            if self._last_mask is None:
                # A mask counts against a matcher's limits, so a matcher that catches up has to make the masks, too.
                _mask(matcher)
            self._last_mask = None
            # End ids are not part of the grammar's text. Before min_tokens the output may have several.
            if not (token_id in self._ends.token_ids and matcher.is_accepting()) and not matcher.consume_token(
                token_id
            ):
                raise _refusal(matcher, Reason.GRAMMAR_DEAD_END)
            self._num_consumed += 1

    def _advance(self, matcher: LLMatcher, words: Words) -> None:
        self._consume(matcher)
        if self._last_mask is not None:
            # The token behind these is chosen again: a second mask would count twice.
            words[:] = self._last_mask
            return
        words[:] = _mask(matcher)[: len(words)]
        self._close(matcher, words)
        self._last_mask = words.copy()

    def _close(self, matcher: LLMatcher, words: Words) -> None:
        """Allows the tokens that end the sequence where the grammar may end, and only there."""
        if matcher.is_accepting():
            _clear(words, self._ends.own)
            index, bits = self._ends.all
            np.bitwise_or.at(words, index, bits)
        else:
            # A stop token ends the sequence even where the grammar takes it as text.
            _clear(words, self._ends.plain)


def _mask(matcher: LLMatcher) -> Words:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint32)
    if matcher.is_error():
        raise _refusal(matcher, Reason.GRAMMAR_DEAD_END)
    return mask


def _clear(words: Words, which: Bits) -> None:
    index, bits = which
    np.bitwise_and.at(words, index, ~bits)


def bits_of(token_ids: Sequence[int] | Ids) -> Bits:
    """Returns the words that ids stand in, and their bits there."""
    ids = np.asarray(token_ids, np.int64)
    return ids // WORD_BITS, np.left_shift(np.uint32(1), (ids % WORD_BITS).astype(np.uint32))


NO_BITS: Bits = bits_of(())


def _refusal(matcher: LLMatcher, reason: Reason) -> BlockyardError:
    """Makes the error of a matcher that failed. `reason`: the error's reason, unless a limit was reached."""
    if is_panic(matcher.get_error()):
        # The panic's text has a stack and may quote an answer, so it is not logged.
        log.error("llguidance panicked in a grammar")
        return _make_failure()
    complaint = " ".join(matcher.get_error().split("<state>")[0].split())[:_MAX_COMPLAINT]
    if is_dead_end(complaint):
        complaint = "no token may follow here, and the answer may not end: a part of the grammar can never be completed"
    return BlockyardError(Reason.GRAMMAR_TOO_COMPLEX if is_limit(complaint) else reason, f"the grammar: {complaint}")


def _make_failure() -> BlockyardError:
    return BlockyardError(Reason.BUG, "the grammar failed unexpectedly: see the worker's log")


class Masks:
    """The masks of a step's rows, made while the step is computed."""

    def __init__(self, rows: Ids, words: Words, done: Future[None]) -> None:
        self.rows = rows
        """[n], those that have one, in ascending order."""
        self._words = words
        self._done = done

    def join(self) -> Words:
        """Waits for the masks: [n, words]."""
        self._done.result()
        return self._words

    def allows(self, row: int, token_id: int) -> bool:
        """Returns whether a row has no mask, or one that allows a token."""
        words = self._words_of(row)
        return words is None or bool(words[token_id // WORD_BITS] >> np.uint32(token_id % WORD_BITS) & np.uint32(1))

    def of_places(self, places: Ids, kept: npt.NDArray[np.bool_]) -> Masks:
        """Returns the masks of some rows for places that are others now; `places` and `kept`: by the place before."""
        is_kept = kept[self.rows]
        words = self._words if is_kept.all() else self.join()[is_kept]
        return Masks(places[self.rows[is_kept]], words, self._done)

    def leaves_only(self, row: int, token_ids: Ids) -> bool:
        """Returns whether a row has a mask that allows no tokens except some of these."""
        words = self._words_of(row)
        if words is None:
            return False
        others = words.copy()
        _clear(others, bits_of(token_ids))
        return not others.any()

    def _words_of(self, row: int) -> Words | None:
        place = int(np.searchsorted(self.rows, row))
        if place == len(self.rows) or self.rows[place] != row:
            return None
        return self.join()[place]
