"""What a worker answers when the model is a hash: the next token is a hash of (sequence index, all ids so far)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_service.core.output import StepResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from scheduler_service.core.output import Fork, NewSequence, SchedulerOutput

_MASK = (1 << 61) - 1
_FACTOR = 6364136223846793005


def extend(state: int, token_ids: Iterable[int]) -> int:
    """Goes on with the hash of a sequence of ids; the hash of none is 0."""
    for token_id in token_ids:
        state = (state * _FACTOR + token_id + 1) % _MASK
    return state


def draw(state: int, sequence_index: int, vocab_size: int) -> int:
    """Gives the next token of a sequence whose ids have this hash."""
    return ((state ^ (sequence_index * 0x9E3779B97F4A7C15)) * _FACTOR >> 20) % vocab_size


def generate(
    prompt_token_ids: Iterable[int],
    num_tokens: int,
    vocab_size: int,
    *,
    sequence_index: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> list[int]:
    """Tells the whole output of one sequence: the oracle that a scheduler's streams are held against."""
    row = Row(extend(0, prompt_token_ids), 0, 0, 0, sequence_index, min_tokens, stop_token_ids)
    tokens: list[int] = []
    while len(tokens) < num_tokens and not row.ended:
        tokens.append(row.sample(vocab_size))
    return tokens


@dataclass(slots=True)
class Row:
    """A sequence as its worker knows it."""

    state: int
    num_known: int
    num_computed: int
    num_output: int
    sequence_index: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    ended: bool = False

    def sample(self, vocab_size: int) -> int:
        """Draws the next token and appends it."""
        token_id = draw(self.state, self.sequence_index, vocab_size)
        if token_id in self.stop_token_ids:
            if self.num_output < self.min_tokens:
                while token_id in self.stop_token_ids:
                    token_id = (token_id + 1) % vocab_size
            else:
                self.ended = True
        self.state = (self.state * _FACTOR + token_id + 1) % _MASK
        self.num_known += 1
        self.num_output += 1
        return token_id


class TokenRows:
    """Executes steps as far as tokens go. It trusts the step: what blocks hold is another's to check."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._rows: dict[int, Row] = {}

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Executes one step. Raises KeyError for a sequence that it does not know."""
        for fork in step.forks:
            self._fork(fork)
        for sequence_id in step.finished_sequence_ids:
            self._rows.pop(sequence_id, None)
        for sequence in step.new_sequences:
            self._add(sequence)
        sampled: list[int] = []
        token_ids: list[int] = []
        skipped: list[int] = []
        for sequence_id, num_new_tokens in zip(step.sequence_ids, step.num_new_tokens, strict=True):
            row = self._rows[sequence_id]
            if row.ended:
                skipped.append(sequence_id)
                continue
            # A child that computes nothing samples from its parent's logits.
            row.num_computed = row.num_computed + num_new_tokens if num_new_tokens else row.num_known
            if row.num_computed > row.num_known:
                raise ValueError(f"sequence {sequence_id} computes more than its {row.num_known} tokens")
            if row.num_computed == row.num_known:
                sampled.append(sequence_id)
                token_ids.append(row.sample(self._vocab_size))
        return StepResult(step.step_id, tuple(sampled), tuple(token_ids), tuple(skipped))

    def _fork(self, fork: Fork) -> None:
        parent = self._rows[fork.parent_id]
        self._rows[fork.child_id] = Row(
            parent.state,
            parent.num_known,
            parent.num_computed,
            parent.num_output,
            fork.sequence_index,
            parent.min_tokens,
            parent.stop_token_ids,
        )

    def _add(self, sequence: NewSequence) -> None:
        self._rows[sequence.sequence_id] = Row(
            extend(0, sequence.token_ids),
            len(sequence.token_ids),
            sequence.num_computed_tokens,
            len(sequence.token_ids) - sequence.prompt_length,
            sequence.sequence_index,
            sequence.spec.min_tokens,
            sequence.spec.stop_token_ids,
        )
