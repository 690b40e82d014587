"""A prompt that kills every worker it meets, among 27 others on two real workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from blockyard import AsyncClient
from blockyard.errors import BlockyardError, Reason
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import run_alone
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.cluster_child import POISON_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.oracles.answers import Known

POISON = [7, 11, 13, 17]
NUM_OTHERS = 27
# One of each kind.
NUM_DIFFERENT = 9
FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "32", "--debug-integrity"]


async def check(client: AsyncClient, known: Known, request_id: str) -> str:
    _, wrong = await known.check(client, request_id)
    return wrong


async def test_a_prompt_that_kills_workers_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(POISON_VARIABLE, ",".join(map(str, POISON)))
    async with Cluster(tiny_model("llama"), tmp_path, num_gateways=1, scheduler_flags=FLAGS) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(5, NUM_DIFFERENT))
            others = [
                asyncio.create_task(check(client, known[number % NUM_DIFFERENT], f"other-{number}"))
                for number in range(NUM_OTHERS)
            ]
            with pytest.raises(BlockyardError, match="died three times") as caught:
                await client.generate(POISON, max_tokens=20, request_id="poison")
            assert caught.value.reason is Reason.POISON_REQUEST
            assert [wrong for wrong in await asyncio.gather(*others) if wrong] == []
            assert cluster.num_deaths("worker-0") + cluster.num_deaths("worker-1") == 3
            assert cluster.log("scheduler").count("requests kill workers") == 1
