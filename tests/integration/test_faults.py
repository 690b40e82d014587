"""Faults at the named points of a step, and a network that parts and heals: each for itself, on the real services."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from blockyard import AsyncClient
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import Known, check_all, run_alone
from tests.kit.processes.cluster import ROOT, Cluster
from tests.kit.waiting import until

if TYPE_CHECKING:
    from pathlib import Path


DEADLINE_SECONDS = 1.5
FLAGS = [
    "--dtype",
    "float32",
    "--num-device-blocks",
    "200",
    "--num-host-blocks",
    "32",
    "--step-deadline-seconds",
    str(DEADLINE_SECONDS),
    "--debug-integrity",
]
FAULTS = (
    ("worker-0", "step.before_answer:kill@20"),
    ("worker-0", "step.before_answer:hang@1"),
    ("worker-0", "step.before_answer:error@9"),
    ("worker-0", "step.after_answer:exit@2"),
    ("scheduler", "step.before_send:kill@30"),
    ("scheduler", "step.after_send:kill@1"),
    ("scheduler", "step.before_publish:kill@12"),
)
# In a request_id.
UNNAMEABLE = str.maketrans("@", "-")


async def strike(cluster: Cluster, client: AsyncClient, known: list[Known], name: str, fault: str) -> None:
    """Gives a member's next life a fault, has it meet requests, and wakes the member where it hangs."""
    cluster.arm(name, fault)
    cluster.kill(name)
    await until(lambda: not cluster.members[name].next_faults)
    await cluster.wait_until_ready()
    told = f"a fault on purpose fault={fault}"
    answers = asyncio.create_task(check_all(client, known, fault.translate(UNNAMEABLE)))
    await until(lambda: told in cluster.log(name) or answers.done())
    if ":hang" in fault:
        await until(lambda: "was not answered within 1.5 s" in cluster.log("scheduler") or answers.done())
        cluster.thaw(name)
    await answers
    assert told in cluster.log(name)


async def test_a_fault_at_each_point_of_a_step_costs_a_pause(tmp_path: Path) -> None:
    async with Cluster(
        tiny_model("llama"), tmp_path, replica_sizes=[1], num_gateways=1, scheduler_flags=FLAGS
    ) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(1, 8))
            for name, fault in FAULTS:
                await strike(cluster, client, known, name, fault)


async def test_a_partition_before_a_worker_heals_and_gives_no_token_twice(tmp_path: Path) -> None:
    """The worker is given up, taken over in a new epoch, and what was held on its way belongs to the old one."""
    async with Cluster(
        tiny_model("llama"), tmp_path, replica_sizes=[1], num_gateways=1, scheduler_flags=FLAGS, with_links=True
    ) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(2, 4))
            link = cluster.links["worker-0"]
            answers = asyncio.create_task(check_all(client, known, "parted"))
            await link.until_busy()
            link.partition()
            await until(lambda: "was not answered within 1.5 s" in cluster.log("scheduler"))
            assert not answers.done()
            link.heal()
            await answers
        assert not cluster.num_deaths("worker-0")
        cluster.check()


async def test_another_replica_takes_over_at_once_or_after_a_step_deadline(tmp_path: Path) -> None:
    async with Cluster(
        ROOT / "models" / "demo", tmp_path, num_gateways=1, scheduler_flags=FLAGS, with_links=True
    ) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(3, 4))
            # A death is noticed by its connection, before the deadline of a step; a hung worker by that.
            for strike_at, waits in ((cluster.kill, False), (cluster.freeze, True)):
                answers = asyncio.create_task(check_all(client, known, strike_at.__name__))
                await cluster.links["worker-0"].until_busy()
                strike_at("worker-0")
                transcripts = await answers
                assert any(transcript.recoveries for transcript in transcripts)
                assert ("was not answered within 1.5 s" in cluster.log("scheduler")) == waits
                cluster.thaw("worker-0")
                await cluster.wait_until_ready()
