"""A short cut of benchmarks/fleet.py: the scheduler's process, three workers by timers, two gateways."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks import fleet

if TYPE_CHECKING:
    import pytest


def test_each_step_of_a_fleet_is_full_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "WARM_UP_SECONDS", 0.1)
    [result] = fleet.measure_all([fleet.Size(num_replicas=3, num_gateways=2, num_rows=8)], seconds=0.5)
    assert result["rows_per_step"] == 8
    assert result["messages_per_step"] > 0
    assert 0 < result["share_of_ideal"] < 1.1
    assert result["cpu_us_per_step"] > 0
    assert 0 <= result["added_ms"]["median"] <= result["added_ms"]["p99"]
