"""A short cut of benchmarks/groups/rank_cost.py: real streams to as many servers as the largest world has ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.groups import rank_cost

if TYPE_CHECKING:
    import pytest


def test_each_size_is_measured_against_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_cost, "NUM_WARM_UP", 4)
    results = rank_cost.measure_all(num_steps=20, num_rounds=1)
    assert [each["num_ranks"] for each in results] == list(rank_cost.WORLD_SIZES)
    assert results[0]["cpu_ratio"]["median"] == 1.0
    assert results[0]["cpu_us_for_each_further_rank"]["median"] == 0.0
    assert all(each["cpu_us"]["min"] > 0 for each in results)
