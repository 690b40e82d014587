"""Several workers under one scheduler: who gets which request, and what becomes of one whose worker is gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.contract.codec.scheduling import decode_submission
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


async def start(harness: Harness, settings: Settings, **changes: object) -> tuple[Server, TokenClient]:
    address = harness.configuration.service.worker_address
    server = await harness.scheduler(settings(worker_address=f"{address}, {address}-2", **changes))
    client = await harness.client()
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    return server, client


def num_running(server: Server) -> list[int]:
    return [stats.num_running for stats in server.service.stats()]


async def check(client: TokenClient, streams: list[Stream], max_tokens: int) -> None:
    for stream in streams:
        assert stream.submission
        prompt = list(decode_submission(stream.submission).prompt_token_ids)
        assert await client.result(stream) == oracle(prompt, max_tokens, n=stream.n), stream.request_id


async def test_requests_are_spread_over_replicas(harness: Harness, settings: Settings) -> None:
    workers = [await harness.worker(name, step_seconds=0.002) for name in ("", "-2")]
    server, client = await start(harness, settings)
    streams = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=100) for number in range(8)]
    await client.wait_until(lambda: all(stream.token_ids[1] for stream in streams))
    assert num_running(server) == [8, 8]
    await check(client, streams, 100)
    await until_idle(server)
    assert [worker.refusals for worker in workers] == [[], []]


async def test_a_prompt_goes_where_most_of_it_is_cached(harness: Harness, settings: Settings) -> None:
    for name in ("", "-2"):
        await harness.worker(name, step_seconds=0.002)
    server, client = await start(harness, settings)
    # One on each; what they leave behind is found again.
    prompts = [[token_id] * 64 for token_id in (1, 2)]
    await check(client, [await client.add(f"first{p[0]}", p) for p in prompts], 8)
    for number in range(6):
        streams = [await client.add(f"again{number}-{p[0]}", [*p, 9 + number]) for p in prompts]
        await check(client, streams, 8)
        assert [stream.num_cached_tokens for stream in streams] == [64, 64]
    assert [stats.num_completion_tokens_total for stats in server.service.stats()] == [56, 56]


async def test_a_replica_that_is_full_is_passed_over(harness: Harness, settings: Settings) -> None:
    for name in ("", "-2"):
        await harness.worker(name, step_seconds=0.002)
    server, client = await start(harness, settings, max_num_seqs=2)
    await check(client, [await client.add("warm", [7] * 64)], 8)
    # All of them would go where the prompt is cached.
    streams = [await client.add(f"r{number}", [7] * 64, max_tokens=60) for number in range(6)]
    await client.wait_until(lambda: sum(bool(stream.token_ids[0]) for stream in streams) >= 4)
    assert num_running(server) == [2, 2]
    await check(client, streams, 60)


@pytest.mark.parametrize("how", ["kill", "drain", "hang"])
async def test_sequences_move_to_a_replica_that_lives(harness: Harness, settings: Settings, how: str) -> None:
    workers = [await harness.worker(name, step_seconds=0.002) for name in ("", "-2")]
    # A dead worker and one that drains are noticed without the deadline of a step, which would outlast the test. The
    # deadline holds for the other worker, too, which may be slow on a busy machine.
    deadline_seconds = 5.0 if how == "hang" else 1_000.0
    server, client = await start(harness, settings, step_deadline_seconds=deadline_seconds)
    streams = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=300) for number in range(6)]
    await client.wait_until(lambda: all(stream.token_ids[1] for stream in streams))
    lost, kept = workers
    if how == "kill":
        await lost.kill()
    elif how == "drain":
        lost.drain()
    else:
        lost.hang()
    await client.wait_until(lambda: sum(bool(stream.recovered) for stream in streams) == 3)
    moved = [stream for stream in streams if stream.recovered]
    before = [len(stream.token_ids[0]) for stream in moved]
    await client.wait_until(lambda: all(len(s.token_ids[0]) > num for s, num in zip(moved, before, strict=True)))
    assert all(stream.recovered[0].exact for stream in moved)
    await check(client, streams, 300)
    if how == "hang":
        lost.go_on()
    await until_idle(server)
    assert kept.refusals == []
    status = await client.status()
    assert status.num_recoveries == 1
    assert [replica.ready for replica in status.replicas][1]
    # A drain is nobody's death.
    assert bool(server.service.dispatcher._deaths._records) is (how != "drain")


async def test_a_move_to_another_kind_of_worker_is_not_exact(harness: Harness, settings: Settings) -> None:
    lost, _ = [await harness.worker(name, step_seconds=0.002, determinism_id=name) for name in ("", "-2")]
    _, client = await start(harness, settings)
    assert client.facts is not None
    await client.wait_until(lambda: client.facts is not None and not client.facts.batch_invariant)
    streams = [await client.add(f"r{number}", [number + 1] * 20, max_tokens=300) for number in range(2)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    await lost.kill()
    await check(client, streams, 300)
    assert [recovered.exact for stream in streams for recovered in stream.recovered] == [False]


async def test_both_die_again_and_again(harness: Harness, settings: Settings) -> None:
    names = ["", "-2"]
    workers: list[FakeWorker] = [await harness.worker(name, step_seconds=0.002) for name in names]
    server, client = await start(harness, settings)
    streams = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=400) for number in range(8)]
    for turn in range(6):
        before = [len(stream.token_ids[1]) for stream in streams]
        # One that gets no token between three deaths would be poison. The first ones may have been on their way.
        await client.wait_until(
            lambda: all(len(s.token_ids[1]) > num + 10 for s, num in zip(streams, before, strict=True))  # noqa: B023
        )
        await workers[turn % 2].kill()
        if turn == 3:
            await workers[(turn + 1) % 2].kill()
            workers[(turn + 1) % 2] = await harness.worker(names[(turn + 1) % 2], step_seconds=0.002)
        workers[turn % 2] = await harness.worker(names[turn % 2], step_seconds=0.002)
    await check(client, streams, 400)
    await until_idle(server)


async def test_a_request_that_kills_every_worker_fails_alone(harness: Harness, settings: Settings) -> None:
    workers = [await harness.worker(name, step_seconds=0.001) for name in ("", "-2")]
    server, client = await start(harness, settings)
    for worker in workers:
        worker.die_of_prompt = (66, 66)
    innocent = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=200) for number in range(12)]
    await client.wait_until(lambda: all(stream.token_ids[1] for stream in innocent))
    poison = await client.add("poison", [66, 66], max_tokens=5)
    with pytest.raises(BlockyardError) as caught:
        await client.result(poison)
    assert caught.value.reason is Reason.POISON_REQUEST
    assert sum(worker.num_deaths for worker in workers) == 3
    await check(client, innocent, 200)
    await until_idle(server)


async def test_one_process_is_one_replica_whatever_its_names(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.002)
    address = harness.configuration.service.worker_address
    # The same socket by two ways of writing its path.
    other = address.replace("/worker", "/./worker")
    server = await harness.scheduler(settings(worker_address=f"{address},{other}"))
    client = await harness.client()
    await client.wait_until_ready()
    stream = await client.add("r", [1] * 20, max_tokens=300)
    assert await client.result(stream) == oracle([1] * 20, 300)
    assert len(server.service.engines) == 2
    assert sorted(engine.is_ready for engine in server.service.engines) == [False, True]
    assert worker.epoch == 1


async def test_a_replica_whose_worker_is_told_of_no_more_ends(harness: Harness, settings: Settings) -> None:
    workers = [await harness.worker(name, step_seconds=0.002) for name in ("", "-2")]
    server, client = await start(harness, settings)
    address = workers[1].address
    assert not server.service.on_replica_gone(address)
    streams = [await client.add(f"r{number}", [number + 1] * 20, max_tokens=300) for number in range(4)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    await workers[1].kill()
    await until(lambda: len(server.service.dispatcher.ready_engines) == 1)
    assert server.service.on_replica_gone(address)
    assert len(server.service.engines) == 1
    await check(client, streams, 300)
    await harness.worker("-3", step_seconds=0.002)
    server.service.on_replica_found(address.replace("-2", "-3"))
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    assert [replica.replica_id for replica in (await client.status()).replicas] == [0, 2]


async def test_a_quiet_tenant_passes_a_flood_wherever_it_waits(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.002, num_device_blocks=60, num_host_blocks=40)
    server = await harness.scheduler(settings(max_num_seqs=6, preemption_mode="swap"))
    client = await harness.client()
    flood = [await client.add(f"f{number}", [number + 1] * 20, max_tokens=150, tenant="flood") for number in range(40)]
    await client.wait_until(lambda: sum(bool(stream.token_ids[0]) for stream in flood) >= 4)
    for number in range(3):
        before = sum(stream.is_done for stream in flood)
        quiet = await client.add(f"q{number}", [90, number], max_tokens=2, tenant="quiet")
        assert await client.result(quiet) == oracle([90, number], 2)
        # It waited for nobody's end: of those that run at a time, fewer ended meanwhile than there are rows.
        assert sum(stream.is_done for stream in flood) - before < 6
    for number, stream in enumerate(flood):
        assert await client.result(stream) == oracle([number + 1] * 20, 150)
    await until_idle(server)
