"""A replica of several workers between gateways and fake ranks: all over real sockets, and what a rank can do to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason
from tests.kit.oracles.token_oracle import oracle, until_idle
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.server import Server
    from tests.kit.fakes.fake_worker import FakeWorker
    from tests.kit.fakes.token_client import Stream, TokenClient
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]


@dataclass
class Running:
    """A scheduler with one replica, its workers by rank, and a gateway."""

    harness: Harness
    workers: list[FakeWorker]
    server: Server
    client: TokenClient
    options: dict[str, Any]

    async def restart(self, rank: int) -> FakeWorker:
        self.workers[rank] = await self.harness.worker(f"-{rank}", **self.options)
        return self.workers[rank]

    async def add(self, num_requests: int, max_tokens: int) -> list[Stream]:
        streams = [
            await self.client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=max_tokens)
            for number in range(num_requests)
        ]
        await self.client.wait_until(lambda: all(stream.token_ids[1] for stream in streams))
        return streams

    async def check(self, streams: list[Stream], max_tokens: int) -> None:
        for number, stream in enumerate(streams):
            assert await self.client.result(stream) == oracle([number + 1] * 20, max_tokens, n=2)
        await until_idle(self.server)

    @property
    def epoch(self) -> int:
        return self.server.service.engines[0].replica.epoch


async def start(
    harness: Harness, settings: Settings, world_size: int = 2, num_stages: int = 1, **options: Any
) -> Running:
    workers = [await harness.worker(f"-{rank}", **options) for rank in range(world_size)]
    address = "+".join(worker.address for worker in workers)
    sizes = {"tensor_parallel_size": world_size // num_stages, "pipeline_parallel_size": num_stages}
    server = await harness.scheduler(settings(worker_address=address, **sizes))
    return Running(harness, workers, server, await harness.client(), options)


@pytest.mark.parametrize("world_size", [2, 8])
async def test_streams_complete_with_the_tokens_of_the_model(
    harness: Harness, settings: Settings, world_size: int
) -> None:
    running = await start(harness, settings, world_size)
    await running.check(await running.add(6, 60), 60)
    assert [worker.refusals for worker in running.workers] == [[]] * world_size
    assert [worker.num_formed for worker in running.workers] == [1] * world_size
    assert running.epoch == 1


@pytest.mark.parametrize(("world_size", "num_stages"), [(2, 2), (4, 2), (3, 3)])
async def test_stages_compute_the_same_with_more_steps_in_flight(
    harness: Harness, settings: Settings, world_size: int, num_stages: int
) -> None:
    running = await start(
        harness,
        lambda **changes: settings(num_device_blocks=40, block_size=8, **changes),
        world_size,
        num_stages,
        step_seconds=0.001,
    )
    streams = await running.add(8, 60)
    running.workers[-1].lose_group_next = True
    await running.check(streams, 60)
    assert [worker.refusals for worker in running.workers[:-1]] == [[]] * (world_size - 1)
    [replica] = running.server.service.engines
    assert replica.step_loop._pipeline.depth == num_stages + 1
    assert (await running.client.status()).num_preemptions > 0


async def test_the_status_tells_ranks(harness: Harness, settings: Settings) -> None:
    running = await start(harness, settings)
    operator = await harness.operator()
    [replica] = (await operator.status()).scheduler.replicas
    assert [(worker.rank, worker.world_size) for worker in replica.workers] == [(0, 2), (1, 2)]
    assert [worker.address for worker in replica.workers] == [worker.address for worker in running.workers]
    assert {worker.state for worker in replica.workers} == {status_pb2.WORKER_STATE_RUNNING}
    assert b'blockyard_workers{state="RUNNING"} 2' in running.server.service.metrics.registry.encode()[0]
    # A replica has the name of each of its workers.
    for name in ("0", running.workers[1].address, running.workers[1].incarnation):
        assert (await operator.drain(name)).replica.replica_id == 0
        assert (await operator.undrain(name)).replica.replica_id == 0
    changed = await operator.stub.SetLogLevel(
        admin_pb2.SetLogLevelRequest(process="0", level=administration_pb2.LOG_LEVEL_DEBUG)
    )
    assert [each.process for each in changed.processes] == [worker.address for worker in running.workers]
    await operator.stub.StartProfile(admin_pb2.StartProfileRequest(replica=running.workers[1].address))
    assert [worker.is_profiling for worker in running.workers] == [False, True]


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_death_of_a_rank_is_one_pause(harness: Harness, settings: Settings, rank: int) -> None:
    running = await start(harness, settings, step_seconds=0.002)
    streams = await running.add(5, 300)
    await running.workers[rank].kill()
    await running.client.wait_until(lambda: running.client.readiness is not None and not running.client.readiness.ready)
    await running.restart(rank)
    await running.check(streams, 300)
    other = running.workers[1 - rank]
    assert (other.num_loads, len(other.plans), other.num_formed) == (1, 1, 2)
    status = await running.client.status()
    assert (status.num_recoveries, running.epoch) == (1, 2)
    assert [record.num_deaths for record in running.server.service.dispatcher._deaths._records.values()] == [1] * 5
    assert all(recovered.exact for stream in streams for recovered in stream.recovered)


async def test_a_rank_that_dies_while_nothing_runs_is_noticed(harness: Harness, settings: Settings) -> None:
    running = await start(harness, settings)
    await running.workers[1].kill()
    client = running.client
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    await running.restart(1)
    await running.check(await running.add(2, 20), 20)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_hangs_is_missed_at_the_deadline(harness: Harness, settings: Settings, rank: int) -> None:
    running = await start(harness, lambda **changes: settings(step_deadline_seconds=0.5, **changes), step_seconds=0.002)
    streams = await running.add(3, 300)
    running.workers[rank].hang()
    client = running.client
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    assert client.readiness is not None and "was not answered within 0.5 s" in client.readiness.message
    running.workers[rank].go_on()
    await running.check(streams, 300)
    assert [worker.num_loads for worker in running.workers] == [1, 1]


async def test_a_rank_that_drains_drains_the_replica(harness: Harness, settings: Settings) -> None:
    running = await start(harness, settings, step_seconds=0.002)
    streams = await running.add(3, 300)
    running.workers[1].drain()
    client = running.client
    await client.wait_until(lambda: client.readiness is not None and "is stopping" in client.readiness.message)
    await running.workers[1].kill()
    await running.restart(1)
    await running.check(streams, 300)
    assert not running.server.service.dispatcher._deaths._records
    assert running.workers[0].num_loads == 1


async def test_a_rank_that_lost_its_group_is_a_pause(harness: Harness, settings: Settings) -> None:
    running = await start(harness, settings, step_seconds=0.002)
    streams = await running.add(3, 200)
    running.workers[1].lose_group_next = True
    await running.check(streams, 200)
    assert running.epoch == 2
    assert [(worker.num_formed, worker.num_loads) for worker in running.workers] == [(2, 1)] * 2


async def test_ranks_that_differ_once_are_a_pause(
    harness: Harness, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start(harness, settings, step_seconds=0.002)
    streams = await running.add(3, 200)
    running.workers[1].num_epochs_to_skew = 1
    await running.check(streams, 200)
    assert running.epoch == 2
    [record] = [record for record in caplog.records if record.message == "two ranks differ: a bug"]
    assert record.__dict__["fields"]["history"] != record.__dict__["fields"]["other_history"]


async def test_requests_over_which_ranks_differ_twice_fail(harness: Harness, settings: Settings) -> None:
    running = await start(harness, settings)
    for worker in running.workers:
        worker.hang()
    stream = await running.client.add("r", [1] * 20, max_tokens=20)
    await until(lambda: len(running.workers[0].devices) == 1 and running.workers[0].devices[0].num_submitted > 0)
    running.workers[1].num_epochs_to_skew = 2
    for worker in running.workers:
        worker.go_on()
    with pytest.raises(BlockyardError, match="differ in the input_digest") as caught:
        await running.client.result(stream)
    assert caught.value.reason is Reason.BUG
    good = await running.client.add("good", [2] * 20, max_tokens=20)
    assert await running.client.result(good) == oracle([2] * 20, 20)


async def test_a_request_that_one_rank_refuses_twice_fails(harness: Harness, settings: Settings) -> None:
    running = await start(harness, settings, step_seconds=0.002)
    running.workers[1].refuse_prompt = (9,) * 30
    with pytest.raises(BlockyardError, match="cannot stand this prompt") as caught:
        await running.client.result(await running.client.add("bad", [9] * 30, max_tokens=20))
    assert caught.value.reason is Reason.BUG
    await running.check(await running.add(2, 20), 20)


async def test_a_replica_that_lost_a_rank_for_good_hands_over(harness: Harness, settings: Settings) -> None:
    """Two replicas of two workers; what one loses goes on at the other, exactly."""
    workers = [await harness.worker(f"-{number}", step_seconds=0.002) for number in range(4)]
    first, second = ("+".join(worker.address for worker in workers[at : at + 2]) for at in (0, 2))
    server = await harness.scheduler(settings(worker_address=f"{first},{second}", tensor_parallel_size=2))
    client = await harness.client()
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    running = Running(harness, workers, server, client, {})
    streams = await running.add(4, 300)
    await workers[3].kill()
    await running.check(streams, 300)
    recovered = [each for stream in streams for each in stream.recovered]
    assert recovered
    assert all(each.exact for each in recovered)


async def test_workers_of_one_name_become_a_replica_when_the_last_has_come(
    harness: Harness, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"workers": ["127.0.0.1", "127.0.0.2"]}

    async def look_up(_: object, host: str, port: str, **__: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (address, int(port))) for address in found[host]]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", look_up)
    monkeypatch.setattr("scheduler_service.replicas.fleet.LOOKUP_SECONDS", 0.02)
    harness.configuration = settings(worker_address="127.0.0.1:0")
    second = await harness.worker(worker_group="g", worker_index=1)
    port = second.address.rpartition(":")[2]
    server = await harness.scheduler(settings(worker_address=f"workers:{port}", tensor_parallel_size=2))
    client = await harness.client(ready=False)
    missing = f"no worker answers at 127.0.0.2:{port}; group g has workers of index 1 where a replica has 0 to 1"
    await client.wait_until(lambda: client.readiness is not None and client.readiness.message == missing)
    harness.configuration = settings(worker_address=f"127.0.0.2:{port}")
    first = await harness.worker(worker_group="g", worker_index=0)
    await client.wait_until_ready()
    assert server.service.engines[0].replica.address == f"{first.address}+{second.address}"
    assert await client.result(await client.add("r", [7] * 9, max_tokens=9)) == oracle([7] * 9, 9)


async def test_a_new_scheduler_takes_a_group_over(harness: Harness, settings: Settings) -> None:
    workers = [await harness.worker(f"-{rank}") for rank in range(2)]
    address = "+".join(worker.address for worker in workers)
    configuration = settings(worker_address=address, tensor_parallel_size=2)
    harness.configuration = configuration
    for epoch in (1, 2):
        async with harness.running_scheduler() as server, harness.gateway(f"g{epoch}") as client:
            await client.wait_until_ready()
            assert await client.result(await client.add(f"r{epoch}", [5], max_tokens=9)) == oracle([5], 9)
            assert server.service.engines[0].replica.epoch == epoch
            # The answer is complete before the last steps are: a group that owes answers is formed anew.
            await until_idle(server)
    assert [(worker.num_loads, worker.num_formed, worker.num_reused) for worker in workers] == [(1, 1, 1)] * 2
