"""The sampling state of a sequence: scalar columns of its row, and lists that only some requests have.

Decides which value of a parameter counts as off. Knows no tensors and no batch.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from blockyard.contract.sampling import NUMBERS
from worker_service.sampling.thinking import ThinkingState
from worker_service.step import Array, NewRow, no_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Protocol

    from worker_service.grammars.matchers import Grammars, GrammarState

    class Follower(Protocol):
        """A state that takes each token of a sequence's output."""

        def add(self, token_id: int) -> None: ...


_NONE = no_ids()


class BadWords:
    """The bad words of a sequence, keyed by the ids before their last one. Never changes, so forks share it.

    The prompt does not count: a word begins and ends in the output.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Takes sequences of at least one id; one with an id beyond the vocabulary can never complete."""
        last_token_ids: dict[bytes, set[int]] = {}
        for token_ids in sequences:
            if max(token_ids) < vocab_size:
                last_token_ids.setdefault(_key(token_ids[:-1]), set()).add(token_ids[-1])
        self._last_token_ids = {key: np.array(sorted(last), np.int64) for key, last in last_token_ids.items()}
        self._lengths = sorted({len(key) // _NONE.itemsize for key in last_token_ids})

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def completing(self, output_token_ids: npt.NDArray[np.integer[Any]]) -> Array:
        """Finds the tokens that would complete a word after this output: int64 [any], some perhaps twice."""
        num_tokens = len(output_token_ids)
        found = [
            self._last_token_ids.get(_key(output_token_ids[num_tokens - length :]), _NONE)
            for length in self._lengths
            if length <= num_tokens
        ]
        return np.concatenate(found) if found else _NONE


def _key(token_ids: Sequence[int] | npt.NDArray[np.integer[Any]]) -> bytes:
    return np.asarray(token_ids, np.int64).tobytes()


# Below this a temperature would only divide by next to nothing.
GREEDY_TEMPERATURE = 1e-5

SAMPLING_FIELDS: list[tuple[str, type[np.generic]]] = [
    ("edits_logits", np.bool_),
    *((name, np.int64 if isinstance(number.neutral, int) else np.float32) for name, number in NUMBERS.items()),
    ("seed", np.int64),
    ("sequence_index", np.int64),
    ("min_tokens", np.int64),
    # The number of best tokens that get log probabilities besides the sampled token and each prompt token; -1: none.
    ("logprobs", np.int64),
    ("prompt_logprobs", np.int64),
    # If not 0: the row belongs to a beam, and gets this many candidates instead of a sample.
    ("num_beam_candidates", np.int64),
]


class PenaltyCounts:
    """The distinct tokens of a sequence and how often each stands in its output, grown token by token."""

    def __init__(self, prompt_token_ids: Array, output_token_ids: Array) -> None:
        distinct = np.unique(np.concatenate([prompt_token_ids, output_token_ids]))
        self._place = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        self._token_ids = distinct.astype(np.int64)
        self._counts = np.zeros(len(distinct), np.float32)
        for token_id in output_token_ids.tolist():
            self.add(token_id)

    def add(self, token_id: int) -> None:
        place = self._place.setdefault(token_id, len(self._place))
        if place == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros(place + 16, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(place + 16, np.float32)])
        self._token_ids[place] = token_id
        self._counts[place] += 1

    @property
    def token_ids(self) -> Array:
        """Every distinct token id: int64 [n]."""
        return self._token_ids[: len(self._place)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """The count of each token id in the output: float32 [n]; 0 if the token is only in the prompt."""
        return self._counts[: len(self._place)]

    def copy(self) -> PenaltyCounts:
        twin = object.__new__(PenaltyCounts)
        twin._place = dict(self._place)
        twin._token_ids = self._token_ids.copy()
        twin._counts = self._counts.copy()
        return twin


class SequenceLists:
    """The lists that a sequence's sampling needs. Forks share them, except for token counts and grammar states."""

    def __init__(self, sequence: NewRow, vocab_size: int, grammars: Grammars | None = None) -> None:
        """`grammars`: None for a model that does not sample."""
        bias = sequence.sampling.logit_bias
        # An id beyond the vocabulary (a checkpoint may name one as its end) can never be sampled.
        self.stop_token_ids = np.array([t for t in sequence.stop_token_ids if t < vocab_size], np.int64)
        self.bias_token_ids = np.array(list(bias), np.int64)
        self.bias_values = np.array(list(bias.values()), np.float32)
        self.allowed_token_ids = np.array(sequence.sampling.allowed_token_ids, np.int64)
        words = sequence.sampling.bad_token_sequences
        self.bad_words = BadWords(words, vocab_size) if words else None
        self.may_draft = sequence.sampling.speculation is not False
        predicted = sequence.sampling.predicted_token_ids
        self.predicted_token_ids = np.array(predicted, np.int32) if predicted else None
        self.counts: PenaltyCounts | None = None
        if sequence.sampling.has_penalties:
            ids, first = sequence.token_ids, sequence.num_virtual_tokens
            self.counts = PenaltyCounts(ids[first : sequence.prompt_length], ids[sequence.prompt_length :])
        budget, tokens = sequence.sampling.thinking_token_budget, sequence.sampling.thinking_tokens
        self.thinking: ThinkingState | None = None
        if budget is not None and tokens is not None:
            self.thinking = ThinkingState(budget, tokens, sequence.token_ids[sequence.prompt_length :].tolist())
        # All ranks must decide this in the same way, whether they sample or not.
        self._has_grammar = bool(sequence.sampling.grammar)
        self.grammar: GrammarState | None = None
        if grammars is not None and self._has_grammar:
            output = sequence.token_ids[sequence.prompt_length :]
            self.grammar = grammars.follow(sequence.sampling.grammar, output, self.stop_token_ids)

    @property
    def edit_logits(self) -> bool:
        """Whether logits are changed for longer than min_tokens."""
        some_lists = len(self.bias_token_ids) > 0 or len(self.allowed_token_ids) > 0 or bool(self.bad_words)
        return some_lists or self.counts is not None or self._has_grammar or self.thinking is not None

    @property
    def forced_token_ids(self) -> Array | None:
        """The only token that may come next: int64 [1]; None if several may."""
        return self.thinking.forced_token_ids if self.thinking is not None else None

    @property
    def followers(self) -> list[Follower]:
        """The states to which each token of the output must be added."""
        return [each for each in (self.counts, self.grammar, self.thinking) if each is not None]

    def copy(self) -> SequenceLists:
        twin = copy(self)
        twin.counts = self.counts.copy() if self.counts else None
        twin.grammar = self.grammar.copy() if self.grammar else None
        twin.thinking = self.thinking.copy() if self.thinking else None
        return twin


def write_sampling(row: Any, sequence: NewRow, lists: SequenceLists, vocab_size: int) -> None:
    """Writes a sequence's scalars into its row, a numpy record with SAMPLING_FIELDS."""
    sampling = sequence.sampling
    row["edits_logits"] = lists.edit_logits or (sequence.min_tokens > 0 and len(lists.stop_token_ids) > 0)
    for name in NUMBERS:
        row[name] = sampling.value(name)
    if sampling.value("top_k") >= vocab_size:
        row["top_k"] = 0
    if sampling.value("temperature") < GREEDY_TEMPERATURE:
        # The sampler takes the likeliest token.
        row["temperature"] = 0
    # A seed has 64 bits; the sign bit counts like any other.
    row["seed"] = np.uint64(sampling.seed or 0).astype(np.int64)
    row["sequence_index"] = sequence.sequence_index
    row["min_tokens"] = sequence.min_tokens
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(sampling, name)
        row[name] = -1 if asked is None else min(asked, vocab_size)
    row["num_beam_candidates"] = min(sequence.num_beam_candidates, vocab_size)
