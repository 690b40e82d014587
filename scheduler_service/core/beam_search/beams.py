"""Computes a beam search: chooses which continuations to follow, finds which have ended and when the search is over.

Knows beams by their rank, not as sequences. The rules are those of `GenerationMixin._beam_search` in transformers 5.23
for a batch of one, in float32 as there, so that ties are the same.
"""

from __future__ import annotations

import math
from ctypes import c_float
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


class Continuation(NamedTuple):
    """A beam, by its rank, and its next token. Sorts better continuations first, ties by the better beam."""

    cost: float
    """The negated sum of the log probabilities."""
    rank: int
    token_id: int


class Hypothesis(NamedTuple):
    """A continuation that has ended."""

    score: float
    token_ids: list[int]
    reason: FinishReason


class BeamSearchState:
    """The state of one search between two tokens.

    `num_outputs`: tokens that each beam has generated. `hypotheses`: the ended continuations, the best first, at most
    as many as there are beams.
    """

    __slots__ = ("_beams", "_costs", "_min_outputs", "_num_kept", "_stop_token_ids", "hypotheses", "num_outputs")

    def __init__(self, beams: BeamSearch, stop_token_ids: frozenset[int], min_outputs: int, num_kept: int) -> None:
        """`num_kept`: the continuations to consider, of all beams together."""
        self._beams = beams
        self._stop_token_ids = stop_token_ids
        self._min_outputs = min_outputs
        self._num_kept = num_kept
        self._costs = [0.0]
        self.num_outputs = 0
        self.hypotheses: list[Hypothesis] = []

    def advance(
        self,
        candidates: Sequence[Sequence[tuple[int, float]]],
        output_of: Callable[[int], list[int]],
        max_outputs: int,
    ) -> list[Continuation]:
        """Chooses the continuations to follow, the best first; empty if the search is over.

        `candidates`: for each rank the likeliest (token id, log probability), best first. `output_of`: returns the
        generated tokens of a rank. `max_outputs`: the most tokens of a beam.
        """
        best = list(islice(merge(*self._extend(candidates)), self._num_kept))
        self.num_outputs += 1
        # An ended continuation counts only among the best; the others are spare ones to follow.
        ended = [one for one in best[: self._beams.width] if self._has_ended(one, max_outputs)]
        self._keep([self._end(one, output_of(one.rank)) for one in ended])
        running = [one for one in best if not self._has_ended(one, max_outputs)][: self._beams.width]
        self._costs = [one.cost for one in running]
        return running if running and self._may_improve(max_outputs) else []

    def give_up(self, outputs: Iterable[list[int]]) -> None:
        """Ends all beams as they are. `outputs`: the generated tokens, by rank."""
        best = zip(self._costs, outputs, strict=True)
        self._keep([Hypothesis(self._score(cost), output, FinishReason.LENGTH) for cost, output in best])

    def _extend(self, candidates: Sequence[Sequence[tuple[int, float]]]) -> Iterator[list[Continuation]]:
        for rank, (cost, likeliest) in enumerate(zip(self._costs, candidates, strict=True)):
            yield [
                Continuation(c_float(cost - logprob).value, rank, token_id)
                for token_id, logprob in likeliest
                if logprob > -math.inf
            ]

    def _has_ended(self, one: Continuation, max_outputs: int) -> bool:
        return self.num_outputs >= max_outputs or self._is_stop(one)

    def _is_stop(self, one: Continuation) -> bool:
        return one.token_id in self._stop_token_ids and self.num_outputs > self._min_outputs

    def _end(self, one: Continuation, output: list[int]) -> Hypothesis:
        reason = FinishReason.STOP if self._is_stop(one) else FinishReason.LENGTH
        return Hypothesis(self._score(one.cost), [*output, one.token_id], reason)

    def _keep(self, ended: list[Hypothesis]) -> None:
        best = sorted([*self.hypotheses, *ended], key=lambda hypothesis: -hypothesis.score)
        self.hypotheses = best[: self._beams.width]

    def _may_improve(self, max_outputs: int) -> bool:
        """Whether a running beam may still end with a better score than the worst kept hypothesis."""
        beams = self._beams
        if len(self.hypotheses) < beams.width:
            return True
        if beams.early_stopping is EarlyStopping.FIRST:
            return False
        looks_ahead = beams.early_stopping is EarlyStopping.NEVER and beams.length_penalty > 0
        best_possible = self._score(self._costs[0], max_outputs if looks_ahead else None)
        return best_possible > self.hypotheses[-1].score

    def _score(self, cost: float, length: int | None = None) -> float:
        length = self.num_outputs if length is None else length
        return c_float(-cost / _power(length, self._beams.length_penalty)).value


def _power(length: int, exponent: float) -> float:
    """Returns length ** exponent in float32, never 0."""
    try:
        power = c_float(max(length, 1) ** exponent).value
    except OverflowError:
        return math.inf
    return power or math.ulp(0.0)
