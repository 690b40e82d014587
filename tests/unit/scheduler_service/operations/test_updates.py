"""Replicas that get other weights: from a folder or from the caller, one after another or at once."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2
from blockyard.contract.workers import WeightsSource
from blockyard.errors import Reason
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service.operations import updates
from scheduler_service.operations.operations import Mode
from scheduler_service.operations.updates import Update
from tests.kit.oracles.token_oracle import oracle
from tests.kit.refusals import refused
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.kit.fakes.fake_worker import FakeWorker
    from tests.unit.scheduler_service.conftest import Harness, Operator

    Settings = Callable[..., SchedulerConfiguration]

PROMPT = [1] * 20


async def update(operator: Operator, **fields: Any) -> list[admin_pb2.UpdateWeightsResponse]:
    return [event async for event in operator.stub.UpdateWeights(admin_pb2.UpdateWeightsRequest(**fields))]


async def two_replicas(harness: Harness, settings: Settings, **options: Any) -> tuple[list[FakeWorker], Operator]:
    address = harness.configuration.service.worker_address
    workers = [await harness.worker(name, **options) for name in ("", "-2")]
    server = await harness.scheduler(settings(worker_address=f"{address},{address}-2"))
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    return workers, await harness.operator()


async def test_replicas_read_a_folder_one_after_another(harness: Harness, settings: Settings) -> None:
    workers, operator = await two_replicas(harness, settings, step_seconds=0.002)
    client = await harness.client()
    streams = [await client.add(f"r{number}", [number] * 9, max_tokens=80) for number in range(4)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    events = await update(operator, version="2")
    assert [(event.replica_id, event.updated.replica.weights_version) for event in events] == [(0, "2"), (1, "2")]
    assert all(event.updated.replica.ready for event in events)
    assert [worker.memory_calls for worker in workers] == 2 * [[("ReloadWeights", "2")]]
    # Fakes compute the same with all weights.
    assert [await client.result(stream) for stream in streams] == [oracle([number] * 9, 80) for number in range(4)]


async def test_who_asked_for_it_fails_rather_than_go_on_with_other_weights(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    names = "goes-on", "fails"
    streams = [await client.add(name, PROMPT, max_tokens=80, fails_on_update=name == "fails") for name in names]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    num_tokens = len(streams[1].token_ids[0])
    await operator.sleep()
    await operator.wake()
    # With the same weights it goes on.
    await client.wait_until(lambda: len(streams[1].token_ids[0]) > num_tokens)
    await update(operator, version="2")
    assert await client.result(streams[0]) == oracle(PROMPT, 80)
    await client.wait_until(lambda: streams[1].error is not None)
    assert streams[1].error.reason is Reason.SLEEPING


async def test_a_caller_sends_tensors_to_the_workers_itself(harness: Harness) -> None:
    worker = await harness.worker()
    server = await harness.scheduler()
    await harness.client()
    operator = await harness.operator()
    heads = [administration_pb2.TensorHead(name=name) for name in "abc"]
    call = operator.stub.UpdateWeights(admin_pb2.UpdateWeightsRequest(version="2", tensors=heads))
    expected = (await call.read()).expected
    assert (list(expected.worker_addresses), list(expected.order)) == ([worker.address], [2, 1, 0])
    assert [list(order.indices) for order in expected.orders] == [[2, 1, 0]]
    assert not server.service.engines[0].takes_requests
    pieces = [worker_pb2.UpdateWeightsRequest(tensor=index, ticket=expected.ticket) for index in expected.order]
    async with internal_channel(expected.worker_addresses[0]) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).UpdateWeights(iter(pieces))
    assert (await call.read()).updated.replica.weights_version == "2"
    assert worker.memory_calls == [("BeginWeightUpdate", "2"), ("UpdateWeights", [2, 1, 0])]
    assert list(worker.update.tensors) == heads


async def test_who_leaves_in_the_middle_leaves_a_stale_replica_that_a_wake_heals(harness: Harness) -> None:
    worker = await harness.worker()
    server = await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    heads = [administration_pb2.TensorHead(name="a")]
    call = operator.stub.UpdateWeights(admin_pb2.UpdateWeightsRequest(version="2", tensors=heads))
    await call.read()
    assert (await refused(operator.wake())).reason is Reason.WRONG_STATE
    call.cancel()
    await until(lambda: "stale weights" in server.service.dispatcher.readiness.message)
    stream = await client.add("r", PROMPT, max_tokens=5)
    assert (await operator.wake()).weights_are_stale
    await operator.wake(reload=True)
    assert await client.result(stream) == oracle(PROMPT, 5)
    assert worker.memory_calls[-1] == ("ReloadWeights", "")


async def test_what_cannot_be_is_refused(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    await harness.client()
    operator = await harness.operator()
    assert (await refused(update(operator))).reason is Reason.FIELD_INVALID
    assert (await refused(update(operator, version="2", replicas=["7"]))).reason is Reason.FIELD_INVALID
    await operator.sleep()
    assert (await refused(update(operator, version="2"))).reason is Reason.WRONG_STATE


async def test_a_worker_that_begins_anew_gets_the_weights_that_were_loaded_last(harness: Harness) -> None:
    worker = await harness.worker()
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    await update(operator, version="2", model="/models/new")
    await worker.kill()
    successor = await harness.worker()
    assert await client.result(await client.add("r", PROMPT, max_tokens=5)) == oracle(PROMPT, 5)
    assert successor.memory_calls == [("ReloadWeights", "2")]
    async with asyncio.timeout(10):
        status = await operator.status()
    assert status.scheduler.replicas[0].weights_version == "2"


async def test_a_caller_that_is_ended_twice_leaves_no_error_that_nobody_reads(harness: Harness) -> None:
    await harness.worker(step_seconds=0.01)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", PROMPT, max_tokens=300)
    await client.wait_until(lambda: len(stream.token_ids[0]) > 3)
    service, unread = server.service, list[str]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context["message"]))

    async def read() -> None:
        async for _ in updates.update(
            service.operations, service.engines, Update(WeightsSource(version="2"), mode=Mode.WAIT)
        ):
            pass

    reading = asyncio.create_task(read())
    await until(lambda: service.engines[0].drain.is_wanted)
    reading.cancel()
    await asyncio.sleep(0)
    # While it waits for what it has begun.
    reading.cancel()
    # Not awaited itself: the error's traceback would keep what nobody reads.
    await asyncio.wait([reading])
    await until(lambda: not service.engines[0].drain.is_wanted)
    del reading
    gc.collect()
    assert unread == []
    assert await client.result(stream) == oracle(PROMPT, 300)
