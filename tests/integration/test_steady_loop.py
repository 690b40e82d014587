"""Workers that are killed within their steady loop: every answer is that of a worker without one."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from blockyard import AsyncClient
from tests.kit.chaos.chaos_requests import ChaosRequest
from tests.kit.kernels.backends import BEST, build_kernels
from tests.kit.kernels.tiny_models import VOCAB_SIZE, tiny_model
from tests.kit.oracles.answers import check_all, run_alone
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.scrape import Scrape
from tests.kit.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

FLAGS = ("--dtype", "float32", "--num-device-blocks", "200", "--max-model-len", "512", "--debug-integrity")
WORKER_FLAGS = ("--num-threads", "1", "--cpu-kernels", BEST, "--worker-metrics-port", "0")
SAMPLED = {"temperature": 1.0, "seed": 5, "top_p": 0.95, "top_k": 80}
LENGTH = 80
# Answers of steps, of a request that is alone: the first is its prompt's.
KILLS = (10, 60)


def make_requests() -> list[ChaosRequest]:
    prompts = [[3 + (7 * place + 11 * number) % (VOCAB_SIZE - 3) for place in range(9)] for number in range(2)]
    options: Any = {"max_tokens": LENGTH, "ignore_eos": True, "return_token_ids": True}
    return [
        ChaosRequest(0, "greedy", prompts[0], {**options, "temperature": 0.0}),
        ChaosRequest(1, "sampled", prompts[1], {**options, **SAMPLED}),
    ]


def num_in_loop(cluster: Cluster) -> float:
    port = re.findall(r"listening .*metrics_port=(\d+)", cluster.log("worker-0"))[-1]
    return Scrape.get(f"127.0.0.1:{port}").sum("blockyard_worker_steady_steps_total")


def start(folder: Path, *worker_flags: str) -> Cluster:
    flags = (*WORKER_FLAGS, *worker_flags)
    model = tiny_model("llama")
    return Cluster(model, folder, replica_sizes=[1], num_gateways=1, scheduler_flags=FLAGS, worker_flags=flags)


# Processes start seven times.
@pytest.mark.timeout(400)
async def test_a_kill_within_the_loop_costs_a_pause(tmp_path: Path) -> None:
    build_kernels()
    async with start(tmp_path / "plain", "--no-steady-loop") as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests())
            assert num_in_loop(cluster) == 0
    async with start(tmp_path / "looping") as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            for one in known:
                await check_all(client, [one], "alone")
            # All decodes but the first ones, which were sent before a loop could begin.
            assert num_in_loop(cluster) > len(known) * (LENGTH - 10)
            await check_all(client, known, "together")
            for one, step in zip(known, KILLS, strict=True):
                cluster.arm("worker-0", f"step.before_answer:kill@{step}")
                cluster.kill("worker-0")
                await until(lambda: not cluster.members["worker-0"].next_faults)
                await cluster.wait_until_ready()
                [transcript] = await check_all(client, [one], f"killed-{step}")
                assert transcript.recoveries
