"""Replicas that are put to sleep and woken: what becomes of their requests, and of new ones."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason
from scheduler_service.requests.placement import are_asleep
from tests.kit.oracles.token_oracle import oracle
from tests.kit.refusals import refused
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]

WEIGHTS, KV_CACHE = administration_pb2.MEMORY_TAG_WEIGHTS, administration_pb2.MEMORY_TAG_KV_CACHE
PROMPT = [1] * 20
ABORT, WAIT = admin_pb2.LEAVE_MODE_ABORT, admin_pb2.LEAVE_MODE_WAIT


async def test_requests_that_are_kept_go_on_after_it_woke(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", PROMPT, max_tokens=60)
    await client.wait_until(lambda: len(stream.token_ids[0]) > 5)
    asleep = await operator.sleep(level=2)
    assert (asleep.freed_bytes, asleep.used_bytes) == (1000, 10)
    [status] = asleep.replica.workers
    assert (status.state, status.message) == (status_pb2.WORKER_STATE_SLEEPING, "asleep")
    assert not asleep.replica.ready
    num_tokens = len(stream.token_ids[0])
    with pytest.raises(BlockyardError) as caught:
        await client.result(await client.add("new", PROMPT))
    assert caught.value.reason is Reason.SLEEPING
    # Weights alone: it is not ready yet.
    woken = await operator.wake(tags=[WEIGHTS], reload=True)
    assert (list(woken.asleep_tags), woken.weights_are_stale) == ([KV_CACHE], False)
    assert len(stream.token_ids[0]) == num_tokens < 60
    await operator.wake()
    assert await client.result(stream) == oracle(PROMPT, 60)
    assert [recovery.exact for recovery in stream.recovered] == [True]
    assert worker.memory_calls == [
        ("Sleep", 2),
        ("WakeUp", [WEIGHTS]),
        ("ReloadWeights", ""),
        ("WakeUp", [KV_CACHE]),
    ]


async def test_it_finishes_what_it_has_if_told_to(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", PROMPT, max_tokens=40)
    await operator.sleep(mode=WAIT)
    assert await client.result(stream) == oracle(PROMPT, 40)
    assert stream.recovered == []


async def test_what_it_has_fails_if_that_is_asked_for(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", PROMPT, max_tokens=400)
    await client.wait_until(lambda: stream.token_ids[0])
    await operator.sleep(mode=ABORT)
    await client.wait_until(lambda: stream.is_done)
    assert stream.error is not None
    assert stream.error.reason is Reason.SLEEPING


async def test_new_requests_wait_if_they_are_to(harness: Harness, settings: Settings) -> None:
    await harness.worker()
    await harness.scheduler(settings(wait_while_asleep=True, max_worker_wait_seconds=0.0))
    client, operator = await harness.client(), await harness.operator()
    await operator.sleep()
    stream = await client.add("r", PROMPT, max_tokens=5)
    await client.wait_until(lambda: stream.first_sequence_id is not None)
    await operator.wake()
    assert await client.result(stream) == oracle(PROMPT, 5)


async def test_others_go_on_with_what_a_replica_leaves(harness: Harness, settings: Settings) -> None:
    address = harness.configuration.service.worker_address
    workers = [await harness.worker(name, step_seconds=0.002) for name in ("", "-2")]
    server = await harness.scheduler(settings(worker_address=f"{address},{address}-2"))
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    client, operator = await harness.client(), await harness.operator()
    streams = [await client.add(f"r{number}", [number] * 9, max_tokens=80) for number in range(4)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    await operator.sleep("0")
    results = [await client.result(stream) for stream in streams]
    assert results == [oracle([number] * 9, 80) for number in range(4)]
    assert await client.result(await client.add("new", PROMPT, max_tokens=3)) == oracle(PROMPT, 3)
    assert [worker.state for worker in workers] == [
        status_pb2.WORKER_STATE_SLEEPING,
        status_pb2.WORKER_STATE_RUNNING,
    ]


async def test_a_worker_that_dies_asleep_is_left_alone_until_it_is_woken(harness: Harness) -> None:
    worker = await harness.worker()
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    await operator.sleep()
    await worker.kill()
    successor = await harness.worker()
    await until(lambda: successor.num_infos > 0)
    with pytest.raises(BlockyardError, match="asleep"):
        await client.result(await client.add("new", PROMPT))
    assert successor.num_loads == 0
    await operator.wake()
    await client.wait_until_ready()
    assert await client.result(await client.add("r", PROMPT, max_tokens=5)) == oracle(PROMPT, 5)


async def test_a_scheduler_finds_a_worker_asleep_and_leaves_it_so(harness: Harness) -> None:
    worker = await harness.worker()
    async with harness.running_scheduler():
        async with harness.gateway("first") as client:
            await client.wait_until_ready()
        await (await harness.operator()).sleep(level=2)
    server = await harness.scheduler()
    await until(lambda: are_asleep(server.service.engines))
    client, operator = await harness.client(ready=False), await harness.operator()
    stale = await operator.wake()
    assert (list(stale.asleep_tags), stale.weights_are_stale) == ([], True)
    await until(lambda: "stale" in server.service.dispatcher.readiness.message)
    await operator.wake(reload=True)
    await client.wait_until_ready()
    assert await client.result(await client.add("r", PROMPT, max_tokens=5)) == oracle(PROMPT, 5)
    assert worker.num_loads == 1


async def test_a_refusal_is_told_and_the_replica_goes_on(harness: Harness) -> None:
    worker = await harness.worker()
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    worker.refuse_sleep = "not here"
    error = await refused(operator.sleep())
    assert (error.reason, worker.address in error.message) == (Reason.FEATURE_DISABLED, True)
    assert (await refused(operator.sleep(level=3))).reason is Reason.FIELD_INVALID
    assert (await refused(operator.sleep(mode=99))).reason is Reason.FIELD_INVALID
    assert (await refused(operator.wake(tags=[WEIGHTS]))).reason is Reason.FIELD_INVALID
    await operator.wake()
    assert await client.result(await client.add("r", PROMPT, max_tokens=5)) == oracle(PROMPT, 5)


async def test_one_thing_is_done_to_a_replica_at_a_time(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    server = await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", PROMPT, max_tokens=300)
    await client.wait_until(lambda: stream.token_ids[0])
    first = asyncio.create_task(operator.sleep(mode=WAIT))
    await until(lambda: server.service.engines[0].drain.is_wanted)
    assert (await refused(operator.wake())).reason is Reason.WRONG_STATE
    first.cancel()
    # Nobody waits for it any more: it takes requests again.
    await until(lambda: server.service.engines[0].takes_requests)
    assert await client.result(stream) == oracle(PROMPT, 300)
    await operator.sleep()
    assert (await refused(operator.undrain(""))).reason is Reason.WRONG_STATE
