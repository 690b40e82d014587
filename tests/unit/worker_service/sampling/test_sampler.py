"""The sampler's order of edits, rows of every kind side by side, and rows that cannot be sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.unit.worker_service.rows import VOCAB, make_sampler, rows_of, sequence
from worker_service.sampling.sampling_state import PenaltyCounts

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.sampling.sampler import Sampler
    from worker_service.step import NewRow

    Sample = Callable[..., list[int]]


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(params=["reference", "auto"])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return make_sampler(request.param)


@pytest.fixture
def sample(sampler: Sampler) -> Sample:
    def choose(logits: torch.Tensor, *sequences: NewRow) -> list[int]:
        sampled = sampler.sample(logits.clone(), rows_of(*sequences))
        assert not sampled.failed.any()
        return sampled.token_ids.tolist()

    return choose


MIXED = [
    sequence(temperature=0.0),
    sequence(seed=1),
    sequence(seed=2, temperature=0.4, top_k=5),
    sequence(seed=2**64 - 3, top_p=0.8),
    sequence(seed=2, temperature=0.4, top_k=5, index=1),
    sequence([3, 4, 9, 9], 2, seed=4, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1),
    sequence(seed=5, top_k=1500, min_p=0.001),
    sequence([3, 8], 1, temperature=0.0, logit_bias={7: 5.0, 1999: -5.0}),
    sequence([3, 8], 1, temperature=0.0, min_tokens=4, stop_token_ids=(0, 1)),
    sequence(seed=6, min_p=0.05),
]


def test_rows_of_every_kind_are_sampled_alike_alone_and_together(sample: Sample) -> None:
    logits = logits_of(len(MIXED))
    together = sample(logits, *MIXED)
    alone = [sample(logits[row : row + 1], one)[0] for row, one in enumerate(MIXED)]
    assert together == alone
    backwards = sample(logits.flip(0), *reversed(MIXED))
    assert backwards[::-1] == together


def test_a_draw_changes_with_seed_index_and_position(sample: Sample) -> None:
    logits = torch.zeros(1, VOCAB)
    base = sample(logits, sequence(seed=1))
    assert sample(logits, sequence(seed=1)) == base
    assert sample(logits, sequence(seed=2)) != base
    assert sample(logits, sequence(seed=1, index=1)) != base
    assert sample(logits, sequence([3, 4], 1, seed=1)) != base
    # Where prompt ends and output begins is part of the key, not the length.
    assert sample(logits, sequence([3, 4], 2, seed=1)) == base


def test_stop_tokens_are_masked_before_min_tokens(sample: Sample) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 6, 7]] = torch.tensor([3.0, 2.0, 1.0])
    greedy = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (5, 6)}
    assert sample(logits, sequence([9], 1, **greedy)) == [7]
    assert sample(logits, sequence([9, 9], 1, **greedy)) == [7]
    assert sample(logits, sequence([9, 9, 9], 1, **greedy)) == [5]


def test_a_bias_does_not_lift_a_masked_token(sample: Sample) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 1.0
    one = sequence(temperature=0.0, min_tokens=1, stop_token_ids=(5,), logit_bias={5: 100.0})
    assert sample(logits, one) == [8]


def test_penalties_come_after_the_bias(sample: Sample) -> None:
    logits = torch.full((1, VOCAB), -9.0)
    logits[0, 4], logits[0, 6] = 1.0, 2.0
    one = sequence([4], 1, temperature=0.0, repetition_penalty=2.0, logit_bias={4: 2.0})
    # Bias, then penalty: 4 -> 1.5 < 2. Penalty, then bias: 4 -> 2.5 > 2.
    assert sample(logits, one) == [6]


def test_penalties_count_what_is_sampled() -> None:
    counts = PenaltyCounts(np.array([3, 3, 5], np.int64), np.array([7], np.int64))
    twin = counts.copy()
    for token_id in [7, 5, *range(100, 150)]:
        counts.add(token_id)
    known = dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert known == {3: 0, 5: 1, 7: 2, **dict.fromkeys(range(100, 150), 1)}
    assert dict(zip(twin.token_ids.tolist(), twin.output_counts.tolist(), strict=True)) == {3: 0, 5: 0, 7: 1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(sample: Sample, sampler: Sampler, bad: float) -> None:
    logits = logits_of(len(MIXED))
    expected = sample(logits, *MIXED)
    for broken in range(len(MIXED)):
        spoiled = logits.clone()
        spoiled[broken, 17] = bad
        sampled = sampler.sample(spoiled, rows_of(*MIXED))
        assert np.flatnonzero(sampled.failed).tolist() == [broken]
        assert np.delete(sampled.token_ids, broken).tolist() == expected[:broken] + expected[broken + 1 :]


def test_a_row_whose_every_token_is_masked_fails(sampler: Sampler) -> None:
    one = sequence(temperature=0.0, min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    sampled = sampler.sample(logits_of(2), rows_of(one, sequence(seed=1)))
    assert sampled.failed.tolist() == [True, False]


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 1500, "top_p": 0.5}])
@pytest.mark.parametrize("temperature", [0.0, 1e-4, 1.0, 1e4, 3e38])
@pytest.mark.parametrize("repetition_penalty", [1e-45, 1e-38, 1e-30, 3e38])
def test_a_penalty_at_the_ends_of_its_range_leaves_the_others_alone(
    sample: Sample, repetition_penalty: float, temperature: float, fields: dict[str, Any]
) -> None:
    logits, plain = logits_of(2), sequence(temperature=1.0, top_p=0.8, seed=4)
    penalized = sequence(list(range(50)), 50, temperature=temperature, repetition_penalty=repetition_penalty, **fields)
    drawn = sample(logits, penalized, plain)
    assert drawn[1:] == sample(logits[1:], plain)
    assert drawn[:1] == sample(logits[:1], penalized)


def test_stop_tokens_beyond_the_vocabulary_are_of_no_matter(sample: Sample) -> None:
    one = sequence(temperature=0.0, min_tokens=1, stop_token_ids=(VOCAB, 2**31))
    assert sample(logits_of(1), one) == [int(logits_of(1).argmax())]
