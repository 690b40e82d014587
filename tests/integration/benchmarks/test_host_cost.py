"""What everything but the network costs, measured on the services as they are served: a short run of it."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import host_cost


@pytest.mark.timeout(60)
async def test_every_process_costs_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "IDLE_SECONDS", 0.2)
    options = Namespace(streams=[2], step_milliseconds=[1.0], tokens=8, rounds=1, client="async")
    [row, idle] = await host_cost.run_all(options)
    assert (row["streams"], idle["streams"]) == (2, 0)
    assert all(row["cpu_us_per_step"][name] > 0 for name in ("gateway", "scheduler", "worker", "client"))
