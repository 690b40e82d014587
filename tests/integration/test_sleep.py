"""A replica of two workers sleeps and wakes under load, and one is killed asleep: every answer is as if alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from blockyard import AsyncClient
from tests.integration.test_admin import admin, load
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import run_alone
from tests.kit.processes.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

NUM_STREAMS = 4
FLAGS = [
    *("--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "32", "--debug-integrity"),
    *("--tensor-parallel-size", "2", "--wait-while-asleep"),
]


async def until_steps(cluster: Cluster, num_steps: int = 10) -> None:
    """Waits until that many more steps were answered."""
    begin = (await cluster.status()).scheduler.replicas[0].num_steps
    async with asyncio.timeout(60):
        # What another process says of itself.
        while (await cluster.status()).scheduler.replicas[0].num_steps < begin + num_steps:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_answers_are_the_same_through_sleeps(tmp_path: Path) -> None:
    cluster = Cluster(tiny_model("llama"), tmp_path, replica_sizes=(2,), num_gateways=1, scheduler_flags=FLAGS)
    async with cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(11, NUM_STREAMS))
            async with load(client, known):
                await until_steps(cluster)
                asleep = await admin(cluster, "sleep")
                assert {worker["state"] for worker in asleep["replica"]["workers"]} == {"WORKER_STATE_SLEEPING"}
                await admin(cluster, "wake")
                await until_steps(cluster)
                await admin(cluster, "sleep", "--level", "2")
                assert (await admin(cluster, "wake"))["weightsAreStale"]
                await admin(cluster, "wake", "--reload")
                await until_steps(cluster)
                await admin(cluster, "sleep", "--mode", "wait")
                cluster.kill("rank-1")
                await admin(cluster, "wake")
                await until_steps(cluster)
        cluster.check()
