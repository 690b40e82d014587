"""What a gateway sees when its worker is absent, dies, refuses a step, or fails a sequence; over real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason
from tests.kit.token_oracle import oracle, until_idle

if TYPE_CHECKING:
    from tests.unit.scheduler_service.conftest import Harness


async def test_without_a_worker_nothing_is_ready_and_why_is_told(harness: Harness) -> None:
    server, client = await harness.scheduler(), await harness.client(ready=False)
    await client.wait_until(lambda: client.readiness is not None and "no worker" in client.readiness.message)
    assert not server.engine.is_ready
    assert client.facts is None
    with pytest.raises(BlockyardError, match="no worker answers") as caught:
        await client.result(await client.add("r", [1]))
    assert caught.value.reason is Reason.NO_READY_WORKER
    assert caught.value.retry_after_seconds == 1.0
    replica = (await client.status()).replicas[0]
    assert not replica.ready
    assert "no worker" in replica.workers[0].message
    await harness.worker()
    await client.wait_until_ready()
    assert await client.result(await client.add("r", [1])) == oracle([1], 8)


async def test_a_lost_worker_fails_its_requests_and_its_successor_serves(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server, client = await harness.scheduler(), await harness.client()
    streams = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=2000) for number in range(5)]
    await client.wait_until(lambda: all(stream.token_ids[1] for stream in streams))
    await worker.kill()
    for stream in streams:
        with pytest.raises(BlockyardError, match="the worker was lost") as caught:
            await client.result(stream)
        assert caught.value.reason is Reason.NO_READY_WORKER
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert caught.value.retry_after_seconds is not None
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    await until_idle(server)
    successor = await harness.worker()
    await client.wait_until_ready()
    again = await client.add("again", [3] * 20, n=2, max_tokens=30)
    assert await client.result(again) == oracle([3] * 20, 30, n=2)
    assert successor.refusals == []
    assert client.end is None
    await until_idle(server)


async def test_a_successor_with_other_pools_gets_a_scheduler_of_its_own(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002, num_device_blocks=50)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=500)
    await client.wait_until(lambda: stream.token_ids[0])
    await worker.kill()
    await harness.worker(num_device_blocks=30, max_model_len=100)
    with pytest.raises(BlockyardError):
        await client.result(stream)
    await client.wait_until(lambda: client.facts is not None and client.facts.max_model_len == 100)
    await client.wait_until_ready()
    assert await client.result(await client.add("s", [2] * 20)) == oracle([2] * 20, 8)
    stats = server.engine.stats()
    assert stats is not None
    assert stats.num_device_blocks == 29


async def test_a_refused_step_ends_the_epoch_and_the_next_one_serves(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=500)
    await client.wait_until(lambda: stream.token_ids[0])
    worker.refuse_next = "block 7 is out of range"
    with pytest.raises(BlockyardError, match="block 7 is out of range") as caught:
        await client.result(stream)
    assert caught.value.reason is Reason.NO_READY_WORKER
    await client.wait_until_ready()
    assert (await client.status()).replicas[0].epoch == 2
    assert await client.result(await client.add("s", [2] * 20)) == oracle([2] * 20, 8)
    await until_idle(server)


async def test_an_answer_that_cannot_be_ends_the_epoch(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=500)
    await client.wait_until(lambda: stream.token_ids[0])
    worker.skew_next = True
    with pytest.raises(BlockyardError, match="the worker was lost"):
        await client.result(stream)
    await client.wait_until_ready()
    assert (await client.status()).replicas[0].epoch == 2
    assert await client.result(await client.add("s", [2] * 20)) == oracle([2] * 20, 8)
    await until_idle(server)


async def test_a_sequence_that_fails_alone_ends_with_an_error(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=400)
    other = await client.add("o", [2] * 20, max_tokens=60)
    await client.wait_until(lambda: stream.token_ids[0])
    assert stream.first_sequence_id is not None
    worker.fail_sequences.add(stream.first_sequence_id)
    await client.wait_until(lambda: stream.is_done)
    assert stream.reasons == {0: sampling_pb2.FINISH_REASON_ERROR}
    assert await client.result(other) == oracle([2] * 20, 60)
    await until_idle(server)


async def test_an_engine_that_stops_ends_with_its_epoch(harness: Harness) -> None:
    # A worker that stops at the same moment may break the epoch just as the engine is cancelled, and hide that from it.
    worker = await harness.worker()
    server = await harness.scheduler()
    await harness.client()
    server.engine.close()
    await worker.kill()
    await asyncio.wait_for(server.run_until(asyncio.Event()), 10)
