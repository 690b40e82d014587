"""The arithmetic of a beam search, by hand. Against transformers it is held in tests/kernels/test_beam_search.py."""

from __future__ import annotations

import math

import pytest

from blockyard.contract.sampling import BeamSearch, EarlyStopping, FinishReason
from scheduler_service.core.beam_search.beams import BeamSearchState, Continuation, Hypothesis

END = 9
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
Candidates = list[tuple[int, float]]


def make(
    width: int = 2,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC,
    *,
    min_outputs: int = 0,
) -> BeamSearchState:
    beams = BeamSearch(width, length_penalty, early_stopping)
    return BeamSearchState(beams, frozenset({END}), min_outputs, 2 * width)


def advance(search: BeamSearchState, *candidates: Candidates, max_outputs: int = 100) -> list[tuple[int, int]]:
    """(rank, token id) of what is chosen. A beam's output is said to be its rank, over and over."""
    chosen = search.advance(candidates, lambda rank: [rank] * search_length(search), max_outputs)
    return [(one.rank, one.token_id) for one in chosen]


def search_length(search: BeamSearchState) -> int:
    return search.num_outputs - 1  # of what a beam has while its next token is chosen


def ended(search: BeamSearchState) -> list[tuple[list[int], float]]:
    return [(best.token_ids, best.score) for best in search.hypotheses]


def test_the_first_choice_is_of_one_beam_the_next_ones_of_all() -> None:
    search = make()
    assert advance(search, [(3, -1.0), (4, -2.0), (5, -3.0)]) == [(0, 3), (0, 4)]
    # -1 - 2.5, -2 - 0.5, -2 - 1
    assert advance(search, [(6, -2.5), (7, -5.0)], [(8, -0.5), (1, -1.0)]) == [(1, 8), (1, 1)]
    assert search.hypotheses == []


def test_equals_are_taken_from_the_better_beam_and_in_the_order_they_came() -> None:
    search = make(3)
    assert advance(search, [(5, -1.0), (2, -1.0), (1, -1.0), (0, -1.0)]) == [(0, 5), (0, 2), (0, 1)]
    same: Candidates = [(4, -1.0), (6, -1.0)]
    assert advance(search, same, same, same) == [(0, 4), (0, 6), (1, 4)]


def test_sums_are_rounded_as_in_float32() -> None:
    """Apart as doubles and equal as floats, so that the better beam comes first."""
    search = make()
    advance(search, [(3, -20.0), (4, -20.000001907348633)])
    close: Candidates = [(6, -1.0 - 2.0**-24)]
    closer: Candidates = [(7, -1.0 + 2.0**-20)]
    assert advance(search, close, closer) == [(0, 6), (1, 7)]
    assert Continuation(1.0, 0, 3) < Continuation(1.0, 1, 2)


def test_an_end_counts_if_it_is_among_the_best() -> None:
    search = make()
    assert advance(search, [(3, -1.0), (END, -2.0), (4, -3.0), (5, -4.0)]) == [(0, 3), (0, 4)]
    assert ended(search) == [([END], -2.0)]
    # Third: it is no answer, and nothing follows it.
    assert advance(search, [(3, -0.1), (4, -0.2), (END, -0.3)], [(5, -9.0)]) == [(0, 3), (0, 4)]
    assert ended(search) == [([END], -2.0)]


def test_a_stop_token_ends_nothing_before_min_tokens() -> None:
    search = make(min_outputs=1)
    assert advance(search, [(END, -1.0), (4, -2.0)]) == [(0, END), (0, 4)]
    assert advance(search, [(3, -1.0)], [(END, -0.5), (5, -7.0)]) == [(0, 3), (1, 5)]
    assert ended(search) == [([1, END], -1.25)]


@pytest.mark.parametrize(
    ("length_penalty", "score"), [(0.0, -6.0), (0.5, -6 / math.sqrt(2)), (1.0, -3.0), (-1.0, -12.0)]
)
def test_a_score_is_a_sum_over_a_power_of_the_length(length_penalty: float, score: float) -> None:
    search = make(length_penalty=length_penalty)
    advance(search, [(3, -2.0), (4, -2.5)])
    advance(search, [(END, -4.0), (4, -8.0)], [(5, -8.0), (6, -8.0)])
    assert ended(search) == [([0, END], pytest.approx(score))]


@pytest.mark.parametrize(("length_penalty", "score"), [(1e6, 0.0), (-1e6, -math.inf)])
def test_no_length_penalty_is_too_much(length_penalty: float, score: float) -> None:
    search = make(length_penalty=length_penalty)
    for _ in range(3):
        advance(search, [(END, -1.0), (4, -2.0), (5, -3.0)], *[[(6, -90.0)]] * (search.num_outputs > 0))
    assert search.hypotheses[-1].score == pytest.approx(score)


def test_at_the_longest_length_the_best_end_whatever_they_are() -> None:
    search = make()
    advance(search, [(3, -1.0), (4, -2.0)], max_outputs=2)
    assert advance(search, [(5, -1.0), (END, -1.5), (6, -2.0)], [(7, -1.25)], max_outputs=2) == []
    assert search.hypotheses == [Hypothesis(-1.0, [0, 5], LENGTH), Hypothesis(-1.25, [0, END], STOP)]


def two_ends(early_stopping: EarlyStopping, length_penalty: float, running: float) -> bool:
    """Whether a search goes on that has as many ends, of -1 and -1.5 each, as beams, and a beam of such a sum."""
    search = make(2, length_penalty, early_stopping)
    advance(search, [(3, -0.5), (4, -0.5)])
    best: Candidates = [(END, -0.5), (5, running + 0.5), (6, running + 0.5)]
    return bool(advance(search, best, [(END, -1.0)], max_outputs=8))


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "running", "goes_on"),
    [
        (EarlyStopping.FIRST, 1.0, -1.6, False),
        (EarlyStopping.FIRST, 2.0, -1.6, False),
        # By its present length no running beam is better than the worst that ended ...
        (EarlyStopping.HEURISTIC, 1.0, -1.6, False),
        (EarlyStopping.HEURISTIC, 0.5, -1.6, False),
        # ... but it may be at full length,
        (EarlyStopping.NEVER, 1.0, -1.6, True),
        (EarlyStopping.NEVER, 1.0, -5.9, True),
        # unless it is too bad for that, or longer is worse.
        (EarlyStopping.NEVER, 1.0, -6.1, False),
        (EarlyStopping.NEVER, 0.0, -1.6, False),
        (EarlyStopping.NEVER, -1.0, -1.6, False),
    ],
)
def test_when_enough_have_ended(
    early_stopping: EarlyStopping, length_penalty: float, running: float, goes_on: bool
) -> None:
    assert two_ends(early_stopping, length_penalty, running) is goes_on


def test_of_those_that_ended_the_best_are_kept() -> None:
    search = make(2, 1.0, EarlyStopping.NEVER)
    advance(search, [(3, -0.5), (END, -8.0), (4, -9.0)])
    for logprob in (-2.0, -1.0, -6.0):
        advance(search, [(3, -0.5), (END, logprob)], [(5, -90.0), (6, -90.0)])
    assert [best.score for best in search.hypotheses] == pytest.approx([-2 / 3, -2.5 / 2])


def test_what_cannot_be_is_not_followed() -> None:
    search = make(3)
    assert advance(search, [(3, -1.0), (4, -math.inf), (5, -math.inf)]) == [(0, 3)]
    assert advance(search, [(3, -1.0), (4, -1.5)]) == [(0, 3), (0, 4)]


def test_a_search_that_is_given_up_ends_with_its_beams() -> None:
    search = make(2)
    advance(search, [(END, -3.0), (3, -4.0), (4, -5.0)])
    search.give_up([[3], [4]])
    assert search.hypotheses == [Hypothesis(-3.0, [END], STOP), Hypothesis(-4.0, [3], LENGTH)]
