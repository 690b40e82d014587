"""The tokens of `ModelWorker` without its checks: for a worker that must cost nothing in a benchmark.

It trusts every step and knows no blocks. The tokens are the same, so there is one oracle, `generate_alone`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from scheduler_service.core.values import StepResult
from tests.kit.oracles.model_worker import extend_name, root_of, sample
from tests.kit.oracles.pooled_numbers import pool_numbers

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core.values import GroupSpec, NewSequence, SchedulerOutput


@dataclass(slots=True)
class TokenRow:
    """A sequence as far as its next token goes. `name` stands for all ids so far."""

    name: int
    seed: int
    sequence_index: int
    num_known: int
    num_computed: int
    num_output: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    pooling: bytes | None
    has_ended: bool = False

    def sample(self, vocab_size: int) -> int:
        """Draws the next token and appends it."""
        position = self.num_output
        if position < self.min_tokens and self.stop_token_ids:
            token_id = sample(self.seed, self.sequence_index, position, self.name, vocab_size, self.stop_token_ids)
        else:
            # The same as above, without the list of what is allowed.
            token_id = hash((self.seed, self.sequence_index, position, self.name)) % vocab_size
            self.has_ended = token_id in self.stop_token_ids
        self.name = extend_name(self.name, token_id)
        self.num_known += 1
        self.num_output += 1
        return token_id


class TokenRows:
    """Executes steps as far as tokens go."""

    def __init__(self, vocab_size: int, seed_of: Callable[[GroupSpec], int]) -> None:
        self._vocab_size = vocab_size
        self._seed_of = seed_of
        self._rows: dict[int, TokenRow] = {}

    def execute(self, step: SchedulerOutput) -> StepResult:
        """Executes one step. Raises KeyError for a sequence that it does not know."""
        for fork in step.forks:
            self._rows[fork.child_id] = replace(self._rows[fork.parent_id], sequence_index=fork.sequence_index)
        for sequence_id in step.finished_sequence_ids:
            self._rows.pop(sequence_id, None)
        for sequence in step.new_sequences:
            self._rows[sequence.sequence_id] = self._make(sequence)
        sampled: list[int] = []
        token_ids: list[int] = []
        skipped: list[int] = []
        pooled: list[tuple[int, bytes]] = []
        for sequence_id, num_new_tokens in zip(step.sequence_ids, step.num_new_tokens, strict=True):
            row = self._rows[sequence_id]
            if row.has_ended:
                skipped.append(sequence_id)
                continue
            # A child that computes nothing samples from its parent's logits.
            row.num_computed = row.num_computed + num_new_tokens if num_new_tokens else row.num_known
            if row.num_computed == row.num_known and row.pooling is not None:
                row.has_ended = True
                pooled.append((sequence_id, pool_numbers(row.pooling, row.name)))
            elif row.num_computed == row.num_known:
                sampled.append(sequence_id)
                token_ids.append(row.sample(self._vocab_size))
        return StepResult(step.step_id, tuple(sampled), tuple(token_ids), tuple(skipped), pooled=tuple(pooled))

    def _make(self, new: NewSequence) -> TokenRow:
        name = root_of(new.spec)
        for token_id in new.token_ids:
            name = extend_name(name, token_id)
        return TokenRow(
            name,
            self._seed_of(new.spec),
            new.sequence_index,
            len(new.token_ids),
            new.num_computed_tokens,
            len(new.token_ids) - new.prompt_length,
            new.spec.min_tokens,
            new.spec.stop_token_ids,
            new.spec.pooling,
        )
