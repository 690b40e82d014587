"""A replica of two workers sleeps, wakes and gets other weights under load, and one is killed asleep.

Every answer is as if alone; one that two sets of weights compute is the first's up to a token, and from there on the
other's continuation of that text.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import grpc.aio
import pytest

from blockyard import AsyncClient
from blockyard.admin.v1 import admin_pb2
from blockyard.client import Delta, Finished, Recovered, update_weights
from blockyard.client.weights import read_tensors
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from tests.integration.test_admin import admin, load
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import run_alone
from tests.kit.processes.cluster import Cluster
from tests.unit.worker_service.weights.test_residency import perturb

if TYPE_CHECKING:
    from pathlib import Path

    from blockyard.client.results import GenerationOptions

NUM_STREAMS, NUM_TOKENS = 3, 200
MODEL = tiny_model("llama")
PROMPT = list(range(5, 25))
OPTIONS: GenerationOptions = {"temperature": 0.0, "return_token_ids": True, "ignore_eos": True}
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
    cluster = Cluster(MODEL, tmp_path, replica_sizes=(2,), num_gateways=1, scheduler_flags=FLAGS)
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
            other = perturb(MODEL, tmp_path / "other")
            await check_update(cluster, client, other)
            await check_killed_update(cluster, client, other)
        cluster.check()


async def check_update(cluster: Cluster, client: AsyncClient, other: Path) -> None:
    """A trainer sends other weights while an answer is generated."""

    async def generate(prompt: list[int], num_tokens: int) -> list[int]:
        answer = await client.generate(prompt, max_tokens=num_tokens, **OPTIONS)
        return list(answer.choices[0].token_ids)

    old = await generate(PROMPT, NUM_TOKENS)
    stream = client.stream(PROMPT, max_tokens=NUM_TOKENS, **OPTIONS)
    token_ids: list[int] = []
    updating: asyncio.Future[dict[int, str]] | None = None
    recoveries: list[Recovered] = []
    finished: Finished | None = None
    async for event in stream:
        if isinstance(event, Delta):
            token_ids += event.token_ids
        elif isinstance(event, Recovered):
            recoveries.append(event)
        elif isinstance(event, Finished):
            finished = event
        if len(token_ids) > 10 and updating is None:
            updating = asyncio.ensure_future(
                asyncio.to_thread(update_weights, cluster.admin_addresses[0], other, "2", mode="keep")
            )
    assert updating is not None
    assert list(await updating) == [0]
    assert finished is not None
    [(first, before), (boundary, after)] = finished.weight_versions
    assert (first, before, after, finished.determinism_id) == (0, "", "2", "")
    assert 10 < boundary < NUM_TOKENS == len(token_ids)
    assert [recovery.exact for recovery in recoveries] == [False]
    assert token_ids[:boundary] == old[:boundary]
    continuation = await generate(PROMPT + token_ids[:boundary], NUM_TOKENS - boundary)
    assert token_ids[boundary:] == continuation != old[boundary:]
    # Back to the model's own weights, which the workers read themselves.
    shared = await asyncio.to_thread(update_weights, cluster.admin_addresses[0], MODEL, "3", shared=True)
    assert list(shared) == [0]
    assert await generate(PROMPT, 20) == old[:20]


async def check_killed_update(cluster: Cluster, client: AsyncClient, other: Path) -> None:
    """A rank dies after some of its tensors, when the other one has all: nobody computes with half of each."""

    before, tensors = await client.generate(PROMPT, max_tokens=20, **OPTIONS), read_tensors(other)
    request = admin_pb2.UpdateWeightsRequest(version="4", tensors=[tensor.head() for tensor in tensors])
    call = cluster.admin().UpdateWeights(request)
    expected = (await call.read()).expected
    ticket = expected.ticket
    [all_of_one, all_of_other] = [
        [
            worker_pb2.UpdateWeightsRequest(tensor=index, data=bytes(tensors[index].data), ticket=ticket)
            for index in order.indices
        ]
        for order in expected.orders
    ]
    async with AsyncExitStack() as stack:
        channels = [internal_channel(address) for address in expected.worker_addresses]
        whole, broken = [
            worker_pb2_grpc.WorkerServiceStub(await stack.enter_async_context(channel)).UpdateWeights()
            for channel in channels
        ]
        for piece in all_of_one:
            await whole.write(piece)
        for piece in all_of_other[:5]:
            await broken.write(piece)
        await whole.done_writing()
        assert (await whole).num_tensors == len(all_of_one)
        cluster.kill("rank-1")
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
    # Both read once more what an operator gave them last: the one that has all, and the one that begins anew.
    await cluster.wait_until_ready()
    after = await client.generate(PROMPT, max_tokens=20, **OPTIONS)
    assert after.choices[0].token_ids == before.choices[0].token_ids
