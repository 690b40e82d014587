"""Our own kernels of sampling: against the definition in float64, against the reference, and a row in any company."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard_kernels.reference.sampling import ReferenceSampling
from blockyard_kernels.sampling import Choices
from tests.kit.kernels.backends import COMPILED, KERNELS, in_dtype
from tests.kit.kernels.choices import check_winners, choices, join, order_of, passing, random_logits, scores

if TYPE_CHECKING:
    from tests.kit.kernels.backends import Kernels

# Around a vector, a counter's tokens and a chunk of either width.
SIZES = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 511, 512, 513, 1023, 1024, 1025, 2049, 5001]
REFERENCE = ReferenceSampling(torch.device("cpu"))
INFINITY = math.inf
for_all = pytest.mark.parametrize("kernels", in_dtype(COMPILED, torch.float32), ids=str)


# Masks

for_each = pytest.mark.parametrize("kernels", in_dtype(KERNELS, torch.float32), ids=str)


@for_each
@pytest.mark.parametrize("size", SIZES)
def test_tokens_without_a_bit_become_impossible_and_nothing_else_changes(kernels: Kernels, size: int) -> None:
    generator = np.random.default_rng(size)
    logits, words = random_logits(5, size), generator.integers(0, 2**32, (3, -(-size // 32)), np.uint32)
    words[1], words[2, ::2] = 0, 2**32 - 1
    rows = np.array([4, 0, 2])
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :size].astype(bool)
    expected = logits.clone()
    expected[torch.from_numpy(rows)] = expected[torch.from_numpy(rows)].masked_fill(
        torch.from_numpy(~allowed), -INFINITY
    )
    kernels.backend.sampling.apply_masks(logits, rows, words)
    assert torch.equal(logits, expected)


# Rows that are not finite


@for_all
@pytest.mark.parametrize("size", SIZES)
def test_rows_that_are_not_finite_are_told(kernels: Kernels, size: int) -> None:
    ops = kernels.backend.sampling
    places = sorted({0, size // 2, size - 1})
    logits = random_logits(1 + 3 * len(places), size)
    for number, place in enumerate(places):
        for offset, bad in enumerate((math.nan, INFINITY, -INFINITY)):
            logits[1 + 3 * number + offset, place] = bad
    assert ops.finite_rows(logits).tolist() == [True] + [False] * (3 * len(places))
    assert ops.finite_rows(torch.full((1, size), torch.finfo(torch.float32).max)).all()


@for_all
def test_what_cannot_be_chosen_is_told_and_harms_no_other_row(kernels: Kernels) -> None:
    ops, size = kernels.backend.sampling, 1500
    logits = random_logits(9, size)
    asked = join(
        choices(3),
        choices(1, 0.0),
        choices(2, top_k=5, top_p=0.9),
        choices(2, top_p=0.5),
        choices(1, min_p=0.1),
    )
    expected = ops.choose(logits, asked)
    for bad in (-INFINITY, math.nan):
        for row in range(9):
            spoiled = logits.clone()
            spoiled[row] = bad
            found = ops.choose(spoiled, asked)
            assert found[row] == -1
            assert np.delete(found, row).tolist() == np.delete(expected, row).tolist()
    logits[:, 77] = INFINITY
    assert (ops.choose(logits, asked) == -1).all()


@for_all
def test_what_is_not_a_number_leads_to_no_id_outside_the_vocabulary(kernels: Kernels) -> None:
    ops, logits = kernels.backend.sampling, random_logits(4, 1500)
    logits[:, ::3] = math.nan
    for asked in (choices(4), choices(4, 0.0), choices(4, top_k=1200, top_p=0.9), choices(4, min_p=0.1, top_p=0.2)):
        found = ops.choose(logits, asked)
        assert ((found >= -1) & (found < 1500)).all()
    told = ops.token_logprobs(logits, np.arange(4), np.zeros(4, np.int64), 1400)
    assert ((told.token_ids >= 0) & (told.token_ids < 1500)).all()


@for_all
def test_nothing_to_do_is_no_error(kernels: Kernels) -> None:
    ops, logits = kernels.backend.sampling, torch.empty(0, 100)
    nothing = np.zeros(0, np.int64)
    assert ops.finite_rows(logits).shape == (0,)
    assert ops.choose(logits, choices(0)).shape == (0,)
    assert ops.token_logprobs(logits, nothing, nothing, 3).token_ids.shape == (0, 4)
    told = ops.token_logprobs(random_logits(2, 100), np.arange(2), None, 0)
    assert told.token_ids.shape == told.logprobs.shape == (2, 0)


@for_all
def test_logits_with_gaps_are_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.backend.sampling.finite_rows(random_logits(4, 10)[:, ::2])


# The first token


@for_all
@pytest.mark.parametrize("size", SIZES)
def test_the_first_token_is_the_largest_with_the_lowest_id(kernels: Kernels, size: int) -> None:
    logits = torch.cat([random_logits(6, size), random_logits(6, size).round(), torch.zeros(1, size)])
    logits[3, : size // 2] = -INFINITY
    asked = choices(13, 0.0, top_k=2, top_p=0.1, min_p=1.0)
    expected = [order_of(row)[0] for row in logits.tolist()]
    assert kernels.backend.sampling.choose(logits, asked).tolist() == expected
    assert REFERENCE.choose(logits, asked).tolist() == expected


# Draws


@for_all
@pytest.mark.parametrize("size", SIZES)
def test_a_draw_is_the_winner_of_the_race(kernels: Kernels, size: int) -> None:
    logits = torch.cat([random_logits(8, size), random_logits(8, size).round(), random_logits(8, size, scale=30)])
    logits[4, 1::2] = -INFINITY
    logits[5, 2:] = -INFINITY
    logits[6, : size - 1] = -INFINITY
    asked = choices(24, 0.7)
    check_winners(kernels.backend.sampling.choose(logits, asked), logits, asked)


@for_all
@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 8.0])
def test_a_draw_of_a_large_vocabulary_is_that_of_the_reference(kernels: Kernels, scale: float) -> None:
    """Most tokens of a peaked row are skipped; of a flat one the smallest noise alone decides."""
    logits, asked = random_logits(12, 50_001, scale=scale), choices(12, 0.9)
    drawn = kernels.backend.sampling.choose(logits, asked)
    expected = REFERENCE.choose(logits, asked)
    for row in np.flatnonzero(drawn != expected).tolist():
        race = scores(logits, asked, row, [drawn[row], expected[row]])
        assert abs(float(race[0] - race[1])) < 1e-5
    assert len(set(drawn.tolist())) > 4


FILTERS: list[dict[str, float]] = [
    {"top_k": 1},
    {"top_k": 3},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 600},
    {"top_k": 1999},
    {"top_k": 2000, "top_p": 0.3},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.99},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_p": 0.8, "min_p": 0.05},
    {"top_k": 7, "top_p": 0.5, "min_p": 0.3},
]


@for_all
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_what_is_filtered_is_the_winner_among_those_that_pass(kernels: Kernels, filters: dict[str, float]) -> None:
    logits = torch.cat([random_logits(8, 2001), random_logits(8, 2001).mul(2).round().div(2)])
    logits[2, 100:] = -INFINITY
    asked = join(choices(12, 0.8, **filters), choices(4, 2.0, seed=2, **filters))  # pyright: ignore[reportArgumentType]
    drawn = kernels.backend.sampling.choose(logits, asked)
    check_winners(drawn, logits, asked)
    assert drawn.tolist() == REFERENCE.choose(logits, asked).tolist()


@for_all
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ties_and_impossible_tokens_pass_as_the_definition_says(kernels: Kernels, data: st.DataObject) -> None:
    values = st.sampled_from([-INFINITY, -3.0, -1.0, 0.0, 0.5, 1.0, 1.0, 4.0])
    row = data.draw(st.lists(values, min_size=1, max_size=40).filter(lambda v: max(v) > -INFINITY))
    logits = torch.tensor([row]).expand(8, -1).contiguous()
    asked = choices(
        8,
        top_k=data.draw(st.integers(0, len(row) + 1)),
        top_p=data.draw(st.sampled_from([1.0, 0.9, 0.5, 0.1])),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
        seed=data.draw(st.integers(0, 99)),
    )
    check_winners(kernels.backend.sampling.choose(logits, asked), logits, asked)


@for_all
def test_of_tokens_that_tie_at_the_last_place_the_lowest_ids_pass(kernels: Kernels) -> None:
    """Many more tie than may pass, over several chunks."""
    logits = torch.zeros(400, 3000)
    logits[:, [2500, 1200]] = 1.0
    drawn = kernels.backend.sampling.choose(logits, choices(400, top_k=6))
    assert set(drawn.tolist()) == {2500, 1200, 0, 1, 2, 3}


@for_all
def test_logits_may_differ_and_their_values_tie(kernels: Kernels) -> None:
    """Neighbouring numbers, the larger the higher the id: where two are one value, the lower id comes first."""
    logits = (torch.arange(2000) * 2.0**-23 + 1.95).expand(200, -1).contiguous()
    asked = choices(200, 1.9, top_k=5)
    assert len((logits[0] / 1.9).unique()) < 1500
    check_winners(kernels.backend.sampling.choose(logits, asked), logits, asked)


@for_all
def test_the_best_tokens_may_all_be_in_one_chunk(kernels: Kernels) -> None:
    """The largest ones of each lane say little of where the best tokens are."""
    logits = random_logits(4, 20_000, scale=0.1)
    logits[:, 40:900] += 20
    asked = choices(4, 2.0, top_k=300)
    check_winners(kernels.backend.sampling.choose(logits, asked), logits, asked)


@for_all
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e4, 3e38])
@pytest.mark.parametrize("largest", [1e-30, 1.0, 1e30])
def test_numbers_at_the_ends_of_their_range(kernels: Kernels, temperature: float, largest: float) -> None:
    logits = random_logits(6, 700)
    logits = logits / logits.abs().max() * largest
    asked = join(
        choices(2, temperature), choices(2, temperature, top_k=9), choices(2, temperature, top_p=0.5, min_p=0.01)
    )
    assert kernels.backend.sampling.choose(logits, asked).tolist() == REFERENCE.choose(logits, asked).tolist()


@for_all
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.75}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8}], ids=str
)
def test_draws_follow_the_renormalised_softmax(kernels: Kernels, filters: dict[str, float]) -> None:
    """Pearson's chi-square of 20,000 draws at successive positions: below the 99.9th percentile for 7 degrees."""
    num_draws = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.25])
    asked = choices(num_draws, 0.8, **filters)  # pyright: ignore[reportArgumentType]
    same = np.zeros(num_draws, np.int64)
    asked = Choices(asked.temperatures, asked.top_k, asked.top_p, asked.min_p, same + 1234, np.arange(num_draws), same)
    drawn = kernels.backend.sampling.choose(logits.expand(num_draws, 8).contiguous(), asked)
    kept = passing(logits[None], asked, 0)
    expected = torch.softmax(logits[kept].double() / 0.8, -1).numpy() * num_draws
    observed = np.bincount(drawn, minlength=8)
    assert observed.sum() == observed[kept].sum()
    assert ((observed[kept] - expected) ** 2 / expected).sum() < 24.3


@for_all
def test_flat_logits_are_drawn_from_evenly(kernels: Kernels) -> None:
    """Each of 64 equal parts of the ids as often as the others: below the 99.9th percentile for 63 degrees."""
    num_draws, size = 6400, 8192
    logits = torch.zeros(num_draws // 16, size)
    drawn = np.concatenate([kernels.backend.sampling.choose(logits, choices(len(logits), seed=s)) for s in range(16)])
    observed = np.bincount(drawn // (size // 64), minlength=64)
    assert ((observed - 100.0) ** 2 / 100).sum() < 103.4
    assert np.bincount(drawn % 4, minlength=4).min() > 1450


# Company


def mixed(num_rows: int) -> Choices:
    kinds = [
        choices(1),
        choices(1, 0.0),
        choices(1, top_k=40),
        choices(1, top_p=0.9),
        choices(1, top_k=700, top_p=0.95),
        choices(1, min_p=0.02, top_p=0.97),
    ]
    asked, keys = join(*(kinds[row % len(kinds)] for row in range(num_rows))), choices(num_rows)
    filters = (asked.temperatures, asked.top_k, asked.top_p, asked.min_p)
    return Choices(*filters, keys.seeds, keys.positions, keys.sequence_indexes)


@for_all
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_row_is_chosen_and_told_of_alike_in_any_company(kernels: Kernels, num_threads: int, rounded: bool) -> None:
    backend, num_rows = kernels.backend, 48
    ops = backend.sampling
    logits = random_logits(num_rows, 5001)
    if rounded:
        logits = logits.bfloat16().float()
    asked, token_ids = mixed(num_rows), np.arange(num_rows) * 97
    before = torch.get_num_threads()
    try:
        backend.set_num_threads(1)
        alone = np.concatenate([ops.choose(logits[row : row + 1], asked.take([row])) for row in range(num_rows)])
        told = [
            ops.token_logprobs(logits[r : r + 1], np.zeros(1, np.int64), token_ids[[r]], 7) for r in range(num_rows)
        ]
        backend.set_num_threads(num_threads)
        shuffled = np.random.default_rng(num_threads).permutation(num_rows)
        for rows in (np.arange(num_rows), shuffled, shuffled[:2], shuffled[:3], shuffled[:7], shuffled[:31]):
            assert np.array_equal(ops.choose(logits[rows], asked.take(rows)), alone[rows])
            together = ops.token_logprobs(logits, rows, token_ids[rows], 7)
            for place, row in enumerate(rows.tolist()):
                assert np.array_equal(together.token_ids[place], told[row].token_ids[0])
                assert np.array_equal(together.logprobs[place], told[row].logprobs[0])
                assert together.ranks[place] == told[row].ranks[0]
    finally:
        backend.set_num_threads(before)


@for_all
def test_logits_stay_as_they_were(kernels: Kernels) -> None:
    ops, logits = kernels.backend.sampling, random_logits(12, 3000)
    before = logits.clone()
    ops.choose(logits, mixed(12))
    ops.token_logprobs(logits, np.arange(12), np.arange(12), 5)
    ops.finite_rows(logits)
    assert torch.equal(logits, before)
