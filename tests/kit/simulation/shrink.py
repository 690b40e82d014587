"""Makes a failing scenario smaller: takes away faults and requests as long as it still fails."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tests.kit.simulation.play import play

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.kit.simulation.scenario import Scenario

T = TypeVar("T")


def shrink(scenario: Scenario, note: Callable[[str], None] = lambda _: None) -> Scenario:
    """Returns a scenario of the same seed that fails with as little as can be; see delta debugging (Zeller, 1999).

    Without a fault or a request everything behind it is scheduled otherwise, so that what is left may fail for another
    reason: any violation counts.
    """

    def fails(smaller: Scenario) -> bool:
        note(f"{len(smaller.faults)} faults, {len(smaller.asks)} requests")
        return bool(smaller.asks) and bool(play(smaller).violations)

    while True:
        faults = reduce_list(scenario.faults, lambda some, whole=scenario: fails(replace(whole, faults=some)))
        smaller = replace(scenario, faults=faults)
        smaller = replace(smaller, asks=reduce_list(smaller.asks, lambda some, s=smaller: fails(replace(s, asks=some))))
        if smaller == scenario:
            return scenario
        scenario = smaller


def reduce_list(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """Returns a part of a list, none of whose items can be taken away, that still fails. The whole list fails."""
    size = len(items) // 2
    while size:
        begin = 0
        while begin < len(items):
            rest = [*items[:begin], *items[begin + size :]]
            if fails(rest):
                items = rest
            else:
                begin += size
        size //= 2
    return items
