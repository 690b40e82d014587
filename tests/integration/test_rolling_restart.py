"""Everything is replaced in turn, as an operator does it, under load: no stream notices more than a pause."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

from blockyard import AsyncClient
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import run_alone
from tests.kit.processes.cluster import Cluster

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kit.oracles.answers import Known

NUM_STREAMS = 6
SCHEDULER_FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "32", "--debug-integrity"]
# Shorter than answers take, so that readers have to go to the other gateway.
GATEWAY_FLAGS = ["--drain-seconds", "0.5"]
PARTS = ("worker-0", "worker-1", "scheduler", "gateway-0", "gateway-1")


async def ask_again_and_again(client: AsyncClient, known: Known, name: str, restarted: asyncio.Event) -> list[str]:
    """Asks the same until all is restarted; gives what was wrong."""
    wrong: list[str] = []
    while not restarted.is_set():
        told = (await known.check(client, f"{name}-{len(wrong)}"))[1]
        wrong.append(told)
    return [told for told in wrong if told]


async def test_a_rolling_restart_of_everything_drops_no_stream(tmp_path: Path) -> None:
    async with Cluster(
        tiny_model("llama"), tmp_path, scheduler_flags=SCHEDULER_FLAGS, gateway_flags=GATEWAY_FLAGS
    ) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(9, NUM_STREAMS))
            restarted = asyncio.Event()
            streams = [
                asyncio.create_task(ask_again_and_again(client, one, f"stream-{number}", restarted))
                for number, one in enumerate(known)
            ]
            for name in PARTS:
                cluster.kill(name, signal.SIGTERM)
                async with asyncio.timeout(30):
                    while not cluster.num_deaths(name):  # noqa: ASYNC110 - another process's end sets no event here
                        await asyncio.sleep(0.02)
                await cluster.wait_until_ready()
            restarted.set()
            assert [wrong for stream in streams for wrong in await stream] == []
        assert [cluster.members[name].exit_codes for name in PARTS] == [[0]] * len(PARTS)
        cluster.check()
