"""One of two workers answers what cannot be: its epoch ends, and nothing else does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from blockyard.errors import BlockyardError, Reason
from scheduler_service.replicas.circuit_breaker import LAST_PAUSE_SECONDS, MAX_UNSOUND_EPOCHS
from scheduler_service.requests.failure_history import POISON_AFTER
from tests.kit.fakes.fake_worker import FakeWorkerOptions
from tests.kit.fakes.wrong_worker import KINDS, WrongWorker
from tests.kit.oracles.token_oracle import oracle, until_idle
from tests.kit.processes.scrape import Scrape
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]

PARTS = sorted({name.split(":")[0] for name in KINDS})
IS_OF_STEPS = {name: kind.rpc == "ExecuteModel" for name, kind in KINDS.items()}


@pytest.mark.parametrize("times", [1, math.inf], ids=["once", "for ever"])
@pytest.mark.parametrize("part", PARTS)
async def test_whatever_one_worker_says_the_other_serves_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, part: str, times: float
) -> None:
    # So many epochs break here that their pauses would be all that takes time.
    monkeypatch.setattr("scheduler_service.replicas.engine.BROKEN_EPOCH_SECONDS", 0.02)
    good = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    kept = await client.add("kept", [1] * 20, max_tokens=4000)
    await client.wait_until(lambda: kept.token_ids[0])
    for number, (name, kind) in enumerate(KINDS.items()):
        if not name.startswith(f"{part}:"):
            continue
        address = f"{harness.configuration.service.worker_address}-{number}"
        async with WrongWorker(kind, times, FakeWorkerOptions(strict=False), address) as worker:
            server.service.on_replica_found(address)
            engine = server.service.engines[-1]
            if IS_OF_STEPS[name]:
                await until(lambda: engine.is_ready)  # noqa: B023
            # None of which the other worker has in its cache: else it would get them all.
            prompts = [[number, i, *range(18)] for i in range(3)]
            streams = [await client.add(f"{name}-{p[1]}", p, n=2, max_tokens=12) for p in prompts]
            await until(lambda: worker.num_applied > 0)
            for prompt, stream in zip(prompts, streams, strict=True):
                assert await client.result(stream) == oracle(prompt, 12, n=2), name
            assert await client.result(await client.add(f"{name}-after", [9] * 20)) == oracle([9] * 20, 8)
            if times == 1:
                await until(lambda: engine.is_ready)  # noqa: B023
        await until(lambda: not engine.is_ready)  # noqa: B023
        assert server.service.on_replica_gone(address)
        assert server.error is None
    if len(kept.token_ids[0]) < 4000:
        await client.abort("kept")
    assert kept.recovered == []
    assert kept.token_ids[0] == oracle([1] * 20, 4000)[0][: len(kept.token_ids[0])]
    assert good.refusals == []
    assert client.end is None


TOO_LARGE = KINDS["tokens: the largest number"]


async def test_a_worker_that_goes_on_so_is_left_aside_and_the_status_says_so(harness: Harness) -> None:
    await harness.worker(step_seconds=0.005)
    server, client = await harness.scheduler(), await harness.client()
    # With this the first worker has fewer rows free.
    kept = await client.add("kept", [99] * 20, max_tokens=4000)
    await client.wait_until(lambda: kept.token_ids[0])
    address = f"{harness.configuration.service.worker_address}-2"
    async with WrongWorker(TOO_LARGE, math.inf, FakeWorkerOptions(strict=False), address) as worker:
        server.service.on_replica_found(address)
        engine = server.service.engines[-1]
        for number in range(MAX_UNSOUND_EPOCHS):
            await until(lambda: engine.is_ready)
            prompt = [number, *range(18)]
            assert await client.result(await client.add(f"r{number}", prompt)) == oracle(prompt, 8)
            await until(lambda: worker.num_applied > number)  # noqa: B023
        await until(lambda: engine.breaker.is_left_aside)
        assert engine.breaker.num_unsound_epochs == MAX_UNSOUND_EPOCHS
        good, wrong = (await client.status()).replicas
        assert (good.left_aside, wrong.left_aside, good.ready, wrong.ready) == (False, True, True, False)
        assert "left aside for 1 s: 3 epochs in a row broke before 2 steps were answered" in wrong.workers[0].message
        assert "token id 4294967295 is not in the vocabulary of 100" in wrong.workers[0].message
        scrape = Scrape.of(server.service.metrics.registry)
        assert scrape.sum("blockyard_workers_left_aside") == 1
        assert scrape.sum("blockyard_worker_losses_total", cause="wrong") == MAX_UNSOUND_EPOCHS
        # It is tried again, and is believed once it answers well.
        worker.times = 0
        await until(lambda: engine.is_ready)
        prompt = [90, *range(18)]
        assert await client.result(await client.add("again", prompt)) == oracle(prompt, 8)
        assert engine.breaker.num_unsound_epochs == 0
        assert not (await client.status()).replicas[1].left_aside
    await client.abort("kept")
    assert kept.recovered == []


async def test_a_successor_of_a_worker_that_is_left_aside_is_taken_at_once(harness: Harness) -> None:
    server, client = await harness.scheduler(), await harness.client(ready=False)
    address = harness.configuration.service.worker_address
    async with WrongWorker(TOO_LARGE, math.inf, FakeWorkerOptions(strict=False), address):
        await client.wait_until_ready()
        [engine] = server.service.engines
        stream = await client.add("r", [1] * 20, n=2, max_tokens=30)
        await until(lambda: engine.breaker.num_unsound_epochs == MAX_UNSOUND_EPOCHS)
        # As if it had gone on so for long.
        engine.breaker.num_unsound_epochs += 10
        await until(lambda: engine.breaker.is_left_aside)
        assert engine.breaker.pause_seconds == LAST_PAUSE_SECONDS
    await harness.worker()
    assert await client.result(stream) == oracle([1] * 20, 30, n=2)
    assert engine.breaker.num_unsound_epochs == 0
    await until_idle(server)


async def test_wrong_answers_of_a_worker_poison_nobody(harness: Harness) -> None:
    """The only worker is broken: what waits for it waits for its successor, however often it was in its hands."""
    server, client = await harness.scheduler(), await harness.client(ready=False)
    address = harness.configuration.service.worker_address
    async with WrongWorker(TOO_LARGE, math.inf, FakeWorkerOptions(strict=False), address) as worker:
        await client.wait_until_ready()
        streams = [await client.add(f"r{number}", [number] * 20, max_tokens=30) for number in range(3)]
        await until(lambda: worker.num_applied > POISON_AFTER)
    assert not any(stream.is_done for stream in streams)
    await harness.worker()
    for number, stream in enumerate(streams):
        assert await client.result(stream) == oracle([number] * 20, 30)
    await until_idle(server)


async def test_a_request_at_which_a_worker_answers_wrong_fails_once_others_were_answered_well(
    harness: Harness,
) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    worker.skew_prompt = (66, 66)
    innocent = [await client.add(f"r{number}", [number + 1] * 20, max_tokens=300) for number in range(4)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in innocent))
    poison = await client.add("poison", [66, 66], max_tokens=5)
    with pytest.raises(BlockyardError) as caught:
        await client.result(poison)
    assert caught.value.reason is Reason.POISON_REQUEST
    for number, stream in enumerate(innocent):
        assert await client.result(stream) == oracle([number + 1] * 20, 300)
    await until_idle(server)


async def test_a_worker_with_another_model_than_the_one_that_serves_is_not_taken(harness: Harness) -> None:
    await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    address = f"{harness.configuration.service.worker_address}-2"
    facts = client.facts
    async with WrongWorker(KINDS["load: another model"], math.inf, FakeWorkerOptions(strict=False), address):
        server.service.on_replica_found(address)
        await until(lambda: "another model" in server.service.engines[-1].readiness.message)
        assert client.facts == facts
        assert await client.result(await client.add("r", [1] * 20)) == oracle([1] * 20, 8)


async def test_an_engine_that_fails_ends_its_epoch_and_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=300)
    await client.wait_until(lambda: len(stream.token_ids[0]) > 5)
    [engine] = server.service.engines
    assert engine.scheduler is not None

    def fail(now: float) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a bug of the scheduler's")

    monkeypatch.setattr(type(engine.scheduler), "schedule", lambda scheduler, now: fail(scheduler))
    assert await client.result(stream) == oracle([1] * 20, 300)
    assert "a bug of the scheduler's" in caplog.text
    assert (await client.status()).replicas[0].epoch == 2
    await until_idle(server)


async def test_an_engine_whose_state_is_broken_fails_what_it_had_and_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    streams = [await client.add(f"r{number}", [number + 1] * 20, max_tokens=3000) for number in range(3)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))

    def fail(_: object) -> None:
        monkeypatch.undo()
        raise ZeroDivisionError("a bug of the scheduler's")

    monkeypatch.setattr("scheduler_service.core.scheduler.Scheduler.evacuate", fail)
    worker.skew_next = True
    for stream in streams:
        with pytest.raises(BlockyardError, match="lost its state") as caught:
            await client.result(stream)
        assert caught.value.reason is Reason.BUG
    assert await client.result(await client.add("s", [2] * 20)) == oracle([2] * 20, 8)
    await until_idle(server)
