"""The cluster of the kit: what dies is back at its address, what is frozen goes on, and nothing is left."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.cluster import Cluster, ClusterError
from tests.kit.processes.status import state_of
from tests.kit.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = ["--dtype", "float32", "--num-device-blocks", "64", "--num-host-blocks", "8"]


def pid_of(cluster: Cluster, name: str) -> int:
    process = cluster.members[name].process
    assert process is not None
    return process.pid


async def test_what_dies_is_back_at_its_address_and_nothing_is_left(tmp_path: Path) -> None:
    async with Cluster(
        tiny_model("llama"), tmp_path, replica_sizes=[1], num_gateways=2, scheduler_flags=FLAGS
    ) as cluster:
        await cluster.wait_until_ready()
        before = {name: pid_of(cluster, name) for name in cluster.members}
        for name in ("gateway-0", "gateway-1", "scheduler", "worker-0"):
            cluster.kill(name)
        await until(lambda: all(pid_of(cluster, name) != before[name] for name in before))
        await cluster.wait_until_ready()
        for target in cluster.targets:
            async with AsyncClient(target) as client:
                answer = await client.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
                assert answer.usage.num_completion_tokens == 3
        assert all(member.exit_codes == [-signal.SIGKILL] for member in cluster.members.values())
        assert all(cluster.num_open_files(name) > 3 for name in before)
        cluster.check()
        # A frozen one is ended too.
        cluster.freeze("gateway-0")
        last = [pid_of(cluster, name) for name in before]
    for pid in last:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_what_is_frozen_stands_still_until_it_is_thawed(tmp_path: Path) -> None:
    async with Cluster(tiny_model("llama"), tmp_path, replica_sizes=[1], num_gateways=1) as cluster:
        await cluster.wait_until_ready()
        pid = pid_of(cluster, "gateway-0")
        cluster.freeze("gateway-0")
        await until(lambda: state_of(pid) == "T")
        cluster.thaw("gateway-0")
        await until(lambda: state_of(pid) in "SR")
        await cluster.wait_until_ready()
        assert pid_of(cluster, "gateway-0") == pid


async def test_a_fault_is_for_one_life_only(tmp_path: Path) -> None:
    async with Cluster(
        tiny_model("llama"), tmp_path, replica_sizes=[1], num_gateways=1, scheduler_flags=FLAGS
    ) as cluster:
        await cluster.wait_until_ready()
        cluster.arm("worker-0", "step.before_answer:kill@2")
        cluster.kill("worker-0")
        await until(lambda: cluster.num_deaths("worker-0") == 1)
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets[0]) as client:
            answer = await client.generate([5, 6, 7], max_tokens=5, ignore_eos=True)
        assert answer.usage.num_completion_tokens == 5
        assert cluster.log("worker-0").count("a fault on purpose fault=step.before_answer:kill@2") == 1
        assert cluster.num_deaths("worker-0") == 2


async def test_a_process_that_ends_by_itself_is_told_with_its_log(tmp_path: Path) -> None:
    async with Cluster(tmp_path, tmp_path / "logs", replica_sizes=[1], num_gateways=1) as cluster:
        with pytest.raises(ClusterError, match=r"(?s)gateway-0 ended with \[1.*config\.json"):
            await cluster.wait_until_ready()
