"""Replicas that an operator drains: what they have goes on elsewhere or ends there, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from blockyard.common.v1 import status_pb2
from blockyard.contract.codec.scheduling import decode_submission
from blockyard.errors import BlockyardError, Reason
from scheduler_service.replicas.drain import Drain
from tests.kit.oracles.token_oracle import oracle, until_idle
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.server import Server
    from tests.kit.fakes.token_client import Stream, TokenClient
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]

TWO = ("", "-2")


async def start_two(harness: Harness, settings: Settings, **changes: object) -> tuple[Server, TokenClient]:
    """A scheduler with two replicas that take requests."""
    address = harness.configuration.service.worker_address
    server = await harness.scheduler(settings(worker_address=f"{address},{address}-2", **changes))
    client = await harness.client()
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    return server, client


async def add_some(client: TokenClient, name: str, num_streams: int, max_tokens: int) -> list[Stream]:
    """Requests of two sequences that have all begun; those of another name have other prompts."""
    first = ord(name) % 50
    streams = [
        await client.add(f"{name}{number}", [first + number] * 20, n=2, max_tokens=max_tokens)
        for number in range(num_streams)
    ]
    await client.wait_until(lambda: all(stream.token_ids[1] for stream in streams))
    return streams


async def check(client: TokenClient, streams: list[Stream], max_tokens: int) -> None:
    for stream in streams:
        assert stream.submission
        prompt = list(decode_submission(stream.submission).prompt_token_ids)
        assert await client.result(stream) == oracle(prompt, max_tokens, n=stream.n), stream.request_id


def is_drained(server: Server, replica_id: int) -> Callable[[], bool]:
    return lambda: server.service.engines[replica_id].drain.is_done


def num_steps(server: Server) -> list[int]:
    return [engine.step_loop.step_log.num_steps for engine in server.service.engines]


async def test_what_a_drained_replica_has_goes_on_at_another(harness: Harness, settings: Settings) -> None:
    workers = [await harness.worker(name, step_seconds=0.002) for name in TWO]
    server, client = await start_two(harness, settings)
    operator = await harness.operator()
    streams = await add_some(client, "r", 6, 300)
    answer = await operator.drain("0")
    assert answer.hands_over
    assert answer.replica.drain_state == status_pb2.DRAIN_STATE_DRAINING
    await until(is_drained(server, 0))
    stopped_at = num_steps(server)[0]
    await check(client, streams, 300)
    await check(client, await add_some(client, "s", 4, 30), 30)
    assert num_steps(server)[0] == stopped_at
    assert sorted(len(stream.recovered) for stream in streams) == [0, 0, 0, 1, 1, 1]
    assert all(recovered.exact for stream in streams for recovered in stream.recovered)
    await until_idle(server)
    assert [worker.refusals for worker in workers] == [[], []]
    # A drain is nobody's death, and computes nothing twice but what its cache held.
    assert not server.service.dispatcher._deaths._records
    assert [stats.num_steps_in_flight for stats in server.service.stats()] == [0, 0]
    [recovery] = (await client.status()).recoveries
    assert (recovery.replica_id, recovery.cause, recovery.num_requests) == (0, "the worker was drained", 3)
    assert recovery.num_replayed_tokens > 3 * 2 * 20
    assert client.readiness is not None and client.readiness.ready


async def test_an_undrained_replica_takes_requests_again(harness: Harness, settings: Settings) -> None:
    for name in TWO:
        await harness.worker(name, step_seconds=0.002)
    server, client = await start_two(harness, settings)
    operator = await harness.operator()
    await operator.drain("1")
    await until(is_drained(server, 1))
    await check(client, await add_some(client, "r", 4, 20), 20)
    assert num_steps(server)[1] == 0
    answer = await operator.undrain("1")
    assert answer.replica.drain_state == status_pb2.DRAIN_STATE_UNSPECIFIED
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    await check(client, await add_some(client, "s", 4, 20), 20)
    assert num_steps(server)[1] > 0
    # Nothing was there that could have gone on elsewhere.
    assert (await client.status()).num_recoveries == 0


async def test_the_only_replica_finishes_what_it_has(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    server, client, operator = await harness.scheduler(), await harness.client(), await harness.operator()
    streams = await add_some(client, "r", 3, 200)
    answer = await operator.drain("")
    assert not answer.hands_over
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    assert client.readiness is not None and "drained" in client.readiness.message
    late = await client.add("late", [9] * 20)
    await check(client, streams, 200)
    await until(is_drained(server, 0))
    assert late.first_sequence_id is not None
    assert not late.token_ids[0]
    assert [stream.recovered for stream in streams] == [[], [], []]
    await operator.undrain("")
    assert await client.result(late) == oracle([9] * 20, 8)
    assert client.readiness.ready
    await until_idle(server)
    assert (await client.status()).num_recoveries == 0


async def test_who_finishes_hands_over_once_another_replica_is_there(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.002)
    address = harness.configuration.service.worker_address
    server = await harness.scheduler(settings(worker_address=f"{address},{address}-2"))
    client, operator = await harness.client(), await harness.operator()
    streams = await add_some(client, "r", 3, 500)
    assert not (await operator.drain("0")).hands_over
    await harness.worker("-2", step_seconds=0.002)
    await until(is_drained(server, 0))
    assert not any(stream.is_done for stream in streams)
    await check(client, streams, 500)
    assert [len(stream.recovered) for stream in streams] == [1, 1, 1]


async def test_an_undrain_in_the_middle_takes_all_back(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    server, client, operator = await harness.scheduler(), await harness.client(), await harness.operator()
    streams = await add_some(client, "r", 3, 200)
    await operator.drain("0")
    late = await client.add("late", [9] * 20)
    await operator.undrain("0")
    assert await client.result(late) == oracle([9] * 20, 8)
    await check(client, streams, 200)
    assert server.service.engines[0].replica.epoch == 1


async def test_drains_are_idempotent(harness: Harness) -> None:
    await harness.worker()
    server, operator = await harness.scheduler(), await harness.operator()
    await harness.client()
    await operator.undrain("0")
    await operator.drain("0")
    await until(is_drained(server, 0))
    assert (await operator.drain("0")).replica.drain_state == status_pb2.DRAIN_STATE_DRAINED
    await operator.undrain("0")
    await until(lambda: server.service.is_ready)


async def test_a_replica_without_a_worker_is_drained_at_once_and_leaves_alone_who_comes(harness: Harness) -> None:
    server, operator = await harness.scheduler(), await harness.operator()
    await operator.drain("0")
    await until(is_drained(server, 0))
    worker = await harness.worker()
    await until(lambda: server.service.engines[0].replica.ranks[0].worker is not None)
    status = (await operator.status()).scheduler.replicas[0]
    assert status.drain_state == status_pb2.DRAIN_STATE_DRAINED
    assert status.workers[0].state == status_pb2.WORKER_STATE_CREATED
    assert worker.num_profiles == 0
    await operator.undrain("0")
    client = await harness.client()
    assert await client.result(await client.add("r", [1])) == oracle([1], 8)


async def test_a_drained_worker_may_be_replaced(harness: Harness, settings: Settings) -> None:
    first, _ = [await harness.worker(name, step_seconds=0.002) for name in TWO]
    server, client = await start_two(harness, settings)
    operator = await harness.operator()
    streams = await add_some(client, "r", 4, 400)
    await operator.drain(first.incarnation)
    await until(is_drained(server, 0))
    await first.kill()
    replica = server.service.engines[0].replica
    await until(lambda: replica.ranks[0].worker is None)
    successor = await harness.worker(step_seconds=0.002)
    await until(lambda: replica.ranks[0].worker is not None)
    assert (await operator.status()).scheduler.replicas[0].workers[0].incarnation == successor.incarnation
    await check(client, streams, 400)
    await operator.undrain("0")
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    assert successor.num_profiles == 1
    assert (await client.status()).num_recoveries == 1


async def test_a_worker_that_dies_while_it_drains_loses_nothing(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server, client, operator = await harness.scheduler(), await harness.client(), await harness.operator()
    streams = await add_some(client, "r", 3, 300)
    await operator.drain("0")
    await worker.kill()
    await until(is_drained(server, 0))
    await harness.worker(step_seconds=0.002)
    await operator.undrain("0")
    await check(client, streams, 300)
    await until_idle(server)


async def test_who_waits_for_a_drained_replica_waits_no_longer_than_for_a_worker(
    harness: Harness, settings: Settings
) -> None:
    await harness.worker()
    server = await harness.scheduler(settings(max_worker_wait_seconds=0.2))
    client, operator = await harness.client(), await harness.operator()
    await operator.drain("0")
    await until(is_drained(server, 0))
    with pytest.raises(BlockyardError, match="the replica was drained") as caught:
        await client.result(await client.add("r", [1]))
    assert caught.value.reason is Reason.NO_READY_WORKER


async def test_a_drained_worker_is_nobody_elses_by_another_name(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.002)
    address = harness.configuration.service.worker_address
    other = address.replace("/worker", "/./worker")
    server = await harness.scheduler(settings(worker_address=f"{address},{other}"))
    client, operator = await harness.client(), await harness.operator()
    await client.result(await client.add("r", [1]))
    owner = next(engine for engine in server.service.engines if engine.is_ready)
    await operator.drain(str(owner.replica_id))
    await until(lambda: owner.drain.is_done)
    num_infos = worker.num_infos
    # Both look who is there meanwhile.
    await until(lambda: worker.num_infos > num_infos + 2)
    assert worker.epoch == 1
    assert not server.service.is_ready


async def test_a_cancelled_request_does_not_hold_a_drain_up(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    server, client, operator = await harness.scheduler(), await harness.client(), await harness.operator()
    await add_some(client, "r", 2, 3000)
    await operator.drain("0")
    await client.cancel("r0", "r1")
    await until(is_drained(server, 0))


async def test_a_drain_meets_a_full_replica(harness: Harness, settings: Settings) -> None:
    for name in TWO:
        await harness.worker(name, step_seconds=0.002, num_device_blocks=40, num_host_blocks=8)
    server, client = await start_two(harness, settings, max_num_seqs=4)
    operator = await harness.operator()
    streams = [await client.add(f"r{number}", [number + 1] * 60, n=2, max_tokens=60) for number in range(8)]
    await client.wait_until(lambda: any(stream.token_ids[1] for stream in streams))
    await operator.drain("1")
    await until(is_drained(server, 1))
    await check(client, streams, 60)
    await until_idle(server)


async def test_replicas_come_and_go_under_load(harness: Harness, settings: Settings) -> None:
    choose = random.Random(6)
    workers = [await harness.worker(name, step_seconds=0.001) for name in TWO]
    server, client = await start_two(harness, settings)
    operator = await harness.operator()
    streams = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=250) for number in range(8)]
    await client.wait_until(lambda: all(stream.token_ids[1] for stream in streams))
    for _ in range(20):
        told = choose.choice((operator.drain, operator.undrain))
        await told(choose.choice("01"))
        num_messages = client.num_messages + choose.randrange(8)
        if server.service.is_ready:
            await client.wait_until(lambda: client.num_messages > num_messages)  # noqa: B023
    for replica in "01":
        await operator.undrain(replica)
    await check(client, streams, 250)
    await until_idle(server)
    assert [worker.refusals for worker in workers] == [[], []]
    assert not server.service.dispatcher._deaths._records


async def test_work_that_a_drain_interrupts_is_cancelled() -> None:
    drain, began, ended = Drain(), asyncio.Event(), asyncio.Event()

    async def work() -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "done"

    waiting = asyncio.create_task(drain.unless_wanted(work()))
    await began.wait()
    drain.begin()
    assert await waiting is None
    assert ended.is_set()


async def test_work_beside_no_drain_is_done() -> None:
    async def work() -> str:
        return "done"

    async def fail() -> str:
        raise ValueError("broken")

    assert await Drain().unless_wanted(work()) == "done"
    with pytest.raises(ValueError, match="broken"):
        await Drain().unless_wanted(fail())
