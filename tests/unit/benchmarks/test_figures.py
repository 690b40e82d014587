"""Medians, extremes and figures."""

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.kit.figures import number, percent, round_figures, spread_of


def test_the_spread_of_values():
    assert spread_of([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_the_spread_of_ratios_is_not_the_ratio_of_medians():
    assert spread_of([1.0, 8.0, 9.0], [1.0, 2.0, 9.0]) == {"median": 1.0, "min": 1.0, "max": 4.0}


@given(st.lists(st.floats(0.1, 1e6), min_size=1))
def test_the_median_lies_between_the_extremes(values):
    spread = spread_of(values)
    assert spread["min"] <= spread["median"] <= spread["max"]


def test_rounds_floats_and_nothing_else():
    given_values = {"a": [1.23456, 123456789.0], "b": {"c": 987654321, "d": "1.23456"}, "e": True}
    assert round_figures(given_values) == {
        "a": [1.235, 123500000.0],
        "b": {"c": 987654321, "d": "1.23456"},
        "e": True,
    }


def test_cells_of_tables():
    spread = spread_of([0.5, 0.75, 0.625])
    assert percent(spread) == "62% (50–75)"
    assert number(spread, 2) == "0.62 (0.50–0.75)"
