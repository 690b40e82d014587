"""What a draft costs, by the times of steps: a pure function that no noise moves far, and none where none can pay."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.pace import MAX_PERIOD, NUM_ROWS, NUM_STEPS, Pace, interpolate

# 135 M parameters on two threads (docs/adr), and a machine on which a row costs as much as the first one.
CURVE = (5.93, 6.18, 6.86, 7.86, 8.88, 10.28, 12.45, 18.0, 24.0)
# A row costs nearly as much as the first one.
STEEP = tuple(1 + 0.8 * (num_rows - 1) for num_rows in NUM_ROWS)
BOUND = tuple(float(num_rows) for num_rows in NUM_ROWS)
times = st.lists(st.floats(1e-6, 1e3), min_size=len(NUM_ROWS), max_size=len(NUM_ROWS)).map(tuple)


def seeded(seconds: tuple[float, ...], max_draft_rows: int = 32) -> Pace:
    pace = Pace(max_draft_rows)
    pace.seed(NUM_ROWS, seconds)
    return pace


def test_a_price_is_what_the_time_of_a_row_would_bring_otherwise() -> None:
    pace = Pace(3)
    pace.seed((1, 2, 4), (10.0, 11.0, 15.0))
    assert pace.find_prices(1) == (100, 200, 200)
    # Two sequences bring two tokens in the time that a step takes now.
    assert pace.find_prices(2) == (364, 364, 364)


def test_a_second_brings_what_it_has_brought_of_late_drafts_and_their_time_among_it() -> None:
    pace = Pace(1)
    pace.seed((1, 2, 4), (10.0, 11.0, 15.0))
    for _ in range(10 * NUM_STEPS):
        pace.note(2, 1, 2, 11.0)
    # Two tokens in the time of two rows, not in the time of the one that is sure.
    assert pace.find_prices(1) == (pytest.approx(1000 * 2 * (11 - 10) / 11, rel=0.05),)


def test_prices_end_where_no_draft_can_pay_and_a_dear_row_is_paid_by_cheap_ones_behind_it() -> None:
    pace = Pace(4)
    pace.seed((1, 2, 3, 4, 5), (10.0, 20.0, 20.0, 20.0, 40.0))
    assert pace.find_prices(1) == (1000, 0, 0)
    pace.seed((1, 2, 3, 4, 5), (10.0, 40.0, 40.0, 40.0, 40.0))
    assert pace.find_prices(1) == (3000, 0, 0, 0)
    pace.seed((1, 2, 3, 4, 5), (10.0, 60.0, 60.0, 60.0, 60.0))
    assert pace.find_prices(1) == ()


def test_who_is_bound_by_computing_never_drafts() -> None:
    pace = seeded(BOUND)
    assert [pace.find_prices(num_sequences) for num_sequences in (1, 2, 8, 32, 200)] == [()] * 5


def test_more_sequences_draft_less() -> None:
    pace = seeded(CURVE)
    counts = [len(pace.find_prices(num_sequences)) for num_sequences in (1, 4, 16, 64)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 11
    assert counts[-1] == 0


def test_nothing_known_is_free_until_it_is_measured() -> None:
    pace = Pace(4)
    assert pace.find_prices(3) == (0, 0, 0, 0)
    for _ in range(40 * NUM_STEPS):
        pace.note(1, 1, 1, 1.0)
        pace.note(5, 1, 5, 100.0)
    assert pace.find_prices(1) == ()


def test_no_step_without_decodes_has_prices() -> None:
    assert Pace(4).find_prices(0) == ()


@given(times, st.integers(0, 40), st.integers(1, 32))
def test_no_price_is_below_zero_and_a_prefix_gains(seconds: tuple[float, ...], num_sequences: int, most: int) -> None:
    prices = seeded(seconds, most).find_prices(num_sequences)
    assert len(prices) <= most
    assert min(prices, default=0) >= 0
    assert sum(950.5 - price for price in prices) >= 0


@given(times, st.integers(0, 2**32))
def test_prices_are_a_function_of_what_was_noted(seconds: tuple[float, ...], seed: int) -> None:
    both = []
    for _ in range(2):
        pace, draw = seeded(seconds), Random(seed)
        for _ in range(3 * NUM_STEPS):
            pace.note(draw.randint(1, 40), 1, draw.randint(1, 5), draw.random())
        both.append([pace.find_prices(num_sequences) for num_sequences in (1, 2, 5)])
    assert both[0] == both[1]


def test_prices_stay_for_64_steps_whatever_comes_and_as_long_as_little_changes() -> None:
    pace, draw = seeded(CURVE), Random(1)
    first = pace.find_prices(2)
    for _ in range(NUM_STEPS - 1):
        pace.note(2, 2, 4, 1000.0)
        assert pace.find_prices(2) is first
    pace.note(2, 2, 4, 1000.0)
    assert pace.find_prices(2) != first
    pace = seeded(CURVE)
    first = pace.find_prices(2)
    for _ in range(20 * NUM_STEPS):
        pace.note(2, 2, 2, 6.18 * draw.uniform(0.98, 1.02))
        assert pace.find_prices(2) == first


def test_it_follows_the_machine_within_bounds() -> None:
    """Twice as slow for all rows is no other price; a curve that a noisy machine shows is not believed."""
    pace = seeded(CURVE)
    wanted = pace.find_prices(1)
    for _ in range(20 * NUM_STEPS):
        for num_rows, seconds in zip(NUM_ROWS, CURVE, strict=True):
            pace.note(num_rows, num_rows, num_rows, 1.3 * seconds)
    assert pace.find_prices(1) == pytest.approx(wanted, rel=0.1, abs=20)
    for _ in range(20 * NUM_STEPS):
        pace.note(1, 1, 1, 1e-9)
        pace.note(12, 12, 12, 1e9)
    assert pace.find_prices(1)[0] <= 1000 * (1.5 * 6.18 / (0.7 * 5.93) - 1)


def test_a_time_that_no_step_has_any_more_follows_the_others() -> None:
    """One bad moment may not end drafts for ever."""
    pace = seeded(STEEP)
    wanted = pace.find_prices(1)
    for _ in range(2 * NUM_STEPS):
        for num_rows in NUM_ROWS[1:]:
            pace.note(num_rows, 1, num_rows, 100.0)
    assert pace.find_prices(1) == () != wanted
    for _ in range(60 * NUM_STEPS):
        pace.note(1, 1, 1, 1.0)
    assert len(pace.find_prices(1)) == pytest.approx(len(wanted), abs=1)


def test_where_no_draft_is_found_for_long_they_are_looked_for_seldom() -> None:
    pace = Pace(4)
    periods = []
    for _ in range(200):
        pace.note_drafts(0)
        periods.append(pace.period)
    assert periods[:16] == [1] * 15 + [2]
    assert periods == sorted(periods) and periods[-1] == MAX_PERIOD
    pace.note_drafts(1)
    assert pace.period == 1


@given(times, st.integers(1, 100))
def test_a_time_lies_between_its_neighbours(seconds: tuple[float, ...], wanted: int) -> None:
    found = interpolate(NUM_ROWS, list(seconds), wanted)
    if wanted in NUM_ROWS:
        assert found == pytest.approx(seconds[NUM_ROWS.index(wanted)])
    elif wanted < NUM_ROWS[-1]:
        above = next(place for place, num_rows in enumerate(NUM_ROWS) if num_rows > wanted)
        low, high = sorted(seconds[above - 1 : above + 1])
        assert low * (1 - 1e-9) <= found <= high * (1 + 1e-9)
    else:
        assert found >= min(seconds)
