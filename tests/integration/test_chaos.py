"""Everything behind the streams dies, and nobody sees more than a pause: `make chaos` in short, in bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kit.chaos.chaos import Plan, run_chaos
from tests.kit.chaos.cuts import run_cuts
from tests.kit.chaos.fault_schedule import Rates
from tests.kit.kernels.backends import build_kernels
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

# Hung workers are given up within the run.
FLAGS = ("--step-deadline-seconds", "1.5", "--debug-integrity")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """The workers take the best kernels that are built."""
    build_kernels()


@pytest.mark.timeout(240)
async def test_streams_outlive_kills_freezes_and_partitions_of_everything(tmp_path: Path) -> None:
    # Of 5,000 seeds, the one whose first 18 seconds have most strikes of most kinds: 15 of 10.
    plan = Plan(
        seed=2555, seconds=18, num_streams=24, num_requests=9, rates=Rates(mean_seconds=1.0), speculation="auto"
    )
    report = await run_chaos(plan, tiny_model("llama"), tmp_path, FLAGS)
    assert not report.failures, str(report)
    assert "the reference kernels serve" not in (tmp_path / "worker-0.log").read_text()
    # It was not for want of trying.
    assert report.prediction.num_accepted_tokens > 0
    assert report.num_recoveries > 0
    assert report.num_resumes > 0
    assert sum(report.deaths.values()) >= 5


@pytest.mark.timeout(240)
async def test_streams_outlive_cuts_of_their_connections_at_any_byte(tmp_path: Path) -> None:
    flags = ["--dtype", "bfloat16", "--num-device-blocks", "400", "--num-host-blocks", "32"]
    async with Cluster(tiny_model("llama"), tmp_path, replica_sizes=[1], scheduler_flags=flags) as cluster:
        report = await run_cuts(cluster, seed=1, num_cuts=150, num_requests=9)
        cluster.check()
    assert not report.failures, str(report)
    assert report.num_cuts >= 150
    assert report.num_resumes >= 50
