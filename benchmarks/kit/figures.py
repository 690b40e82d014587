"""Numbers of several rounds as they are kept and shown: medians with extremes, four figures each."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Sequence

SIGNIFICANT_FIGURES = 4


class Spread(TypedDict):
    """What several rounds gave."""

    median: float
    min: float
    max: float


def spread_of(values: Sequence[float], divisors: Sequence[float] | None = None) -> Spread:
    """The spread of values, or of their ratios to others of the same rounds: the median of ratios, not of medians."""
    if divisors is not None:
        values = [value / divisor for value, divisor in zip(values, divisors, strict=True)]
    return Spread(median=statistics.median(values), min=min(values), max=max(values))


class Quantiles(TypedDict):
    """Of many values: the one in the middle, and the one that a hundredth exceed."""

    median: float
    p99: float


def quantiles(values: Sequence[float]) -> Quantiles:
    """Returns the median and the 99th percentile."""
    ordered = sorted(values)
    return Quantiles(median=statistics.median(ordered), p99=ordered[int(0.99 * (len(ordered) - 1))])


def round_figures(value: Any) -> Any:
    """Rounds every float in nested lists and objects."""
    if isinstance(value, dict):
        return {name: round_figures(each) for name, each in value.items()}
    if isinstance(value, list):
        return [round_figures(each) for each in value]
    return float(f"{value:.{SIGNIFICANT_FIGURES}g}") if isinstance(value, float) else value


def percent(spread: Spread) -> str:
    """Ratios as a cell of a table: 71 % (69-73)."""
    return f"{spread['median']:.0%} ({100 * spread['min']:.0f}–{100 * spread['max']:.0f})"


def number(spread: Spread, digits: int = 0) -> str:
    """Numbers as a cell of a table."""
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f}–{spread['max']:.{digits}f})"
