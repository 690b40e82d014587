"""What a gateway sees when its worker is absent, dies, refuses a step, or fails a sequence; over real sockets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from tests.kit.oracles.token_oracle import oracle, until_idle

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]


async def test_without_a_worker_nothing_is_ready_and_why_is_told(harness: Harness) -> None:
    server, client = await harness.scheduler(), await harness.client(ready=False)
    await client.wait_until(lambda: client.readiness is not None and "no worker" in client.readiness.message)
    assert not server.service.is_ready
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


async def test_a_lost_worker_is_a_pause(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server, client = await harness.scheduler(), await harness.client()
    streams = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=300) for number in range(5)]
    await client.wait_until(lambda: all(stream.token_ids[1] for stream in streams))
    await worker.kill()
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    [stats] = server.service.stats()
    assert stats.num_free_device_blocks == stats.num_device_blocks
    late = await client.add("late", [7] * 20, max_tokens=9)
    await client.wait_until(lambda: late.first_sequence_id is not None)
    successor = await harness.worker(step_seconds=0.0)
    for number, stream in enumerate(streams):
        assert await client.result(stream) == oracle([number + 1] * 20, 300, n=2)
    assert await client.result(late) == oracle([7] * 20, 9)
    assert successor.refusals == []
    assert client.end is None
    await until_idle(server)
    status = await client.status()
    assert status.num_recoveries == 1
    assert status.num_replayed_tokens > 5 * 2 * 20
    [record] = [record for record in caplog.records if record.message == "the worker was lost"]
    assert record.levelname == "WARNING"


async def test_a_worker_that_dies_again_and_again_costs_no_token(harness: Harness) -> None:
    server, client = await harness.scheduler(), await harness.client(ready=False)
    worker = await harness.worker(step_seconds=0.002)
    await client.wait_until_ready()
    stream = await client.add("r", [3] * 40, n=3, max_tokens=200)
    for num_tokens in (10, 30, 50):
        await client.wait_until(lambda: len(stream.token_ids[2]) > num_tokens)  # noqa: B023
        await worker.kill()
        worker = await harness.worker(step_seconds=0.002)
    assert await client.result(stream) == oracle([3] * 40, 200, n=3)
    await until_idle(server)


async def test_a_request_that_kills_workers_fails_alone_after_three_deaths(harness: Harness) -> None:
    server, client = await harness.scheduler(), await harness.client(ready=False)
    worker = await harness.worker()
    await client.wait_until_ready()
    await worker.kill()
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    # They all come before the worker in one step, and nobody gets a token before it dies.
    innocent = [await client.add(f"r{number}", [number + 1] * 20, n=2, max_tokens=30) for number in range(12)]
    poison = await client.add("poison", [66, 66], max_tokens=5)
    innocent += [await client.add(f"s{number}", [number + 30] * 20, max_tokens=30) for number in range(12)]
    await client.wait_until(lambda: innocent[-1].first_sequence_id is not None)
    worker = await harness.worker()
    worker.die_of_prompt = (66, 66)
    with pytest.raises(BlockyardError, match="died three times") as caught:
        await client.result(poison)
    assert caught.value.reason is Reason.POISON_REQUEST
    for number, stream in enumerate(innocent[:12]):
        assert await client.result(stream) == oracle([number + 1] * 20, 30, n=2)
    for number, stream in enumerate(innocent[12:]):
        assert await client.result(stream) == oracle([number + 30] * 20, 30)
    assert worker.num_deaths == 3
    await until_idle(server)


async def test_requests_that_wait_too_long_for_a_worker_fail(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server = await harness.scheduler(settings(max_worker_wait_seconds=0.3))
    client = await harness.client()
    stream = await client.add("r", [1] * 20, n=2, max_tokens=2000)
    await client.wait_until(lambda: stream.token_ids[1])
    await worker.kill()
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    late = await client.add("late", [7] * 20)
    for waiting in (stream, late):
        with pytest.raises(BlockyardError, match=r"no worker was ready for 0\.3 s") as caught:
            await client.result(waiting)
        assert caught.value.reason is Reason.NO_READY_WORKER
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        assert caught.value.retry_after_seconds is not None
    await until_idle(server)
    await harness.worker()
    await client.wait_until_ready()
    assert await client.result(await client.add("again", [3] * 20)) == oracle([3] * 20, 8)


@pytest.mark.parametrize(
    ("before", "after", "exact"),
    [
        ({}, {}, True),
        ({}, {"determinism_id": "other"}, False),
        ({"batch_invariant": False}, {"batch_invariant": False}, False),
        ({"batch_invariant": False}, {}, False),
    ],
)
async def test_gateways_are_told_what_went_on_and_whether_exactly(
    harness: Harness, before: dict[str, object], after: dict[str, object], exact: bool
) -> None:
    worker = await harness.worker(step_seconds=0.002, **before)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, n=2, max_tokens=200)
    await client.wait_until(lambda: stream.token_ids[1])
    await worker.kill()
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    late = await client.add("late", [7] * 20)
    await client.wait_until(lambda: late.first_sequence_id is not None)
    num_tokens = [len(token_ids) for token_ids in stream.token_ids]
    await harness.worker(**after)
    assert await client.result(stream) == oracle([1] * 20, 200, n=2)
    [recovered] = stream.recovered
    assert (recovered.cause, recovered.exact) == ("the worker was lost", exact)
    assert recovered.num_replayed_tokens == 40 + sum(num_tokens)
    assert stream.recovered_at == num_tokens[:1]
    await client.result(late)
    assert late.recovered == []
    await until_idle(server)


async def test_what_ends_while_there_is_no_worker_is_not_computed(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server = await harness.scheduler(settings(resume_window_seconds=0.0))
    client = await harness.client()
    stream = await client.add("r", [1] * 20, n=2, max_tokens=2000)
    async with harness.gateway("goes") as goes:
        await goes.wait_until_ready()
        gone = await goes.add("gone", [2] * 20, max_tokens=2000)
        await goes.wait_until(lambda: gone.token_ids[0])
        await client.wait_until(lambda: stream.token_ids[1])
        await worker.kill()
        await goes.wait_until(lambda: goes.readiness is not None and not goes.readiness.ready)
    await client.abort("r")
    await until_idle(server)
    successor = await harness.worker()
    await client.wait_until_ready()
    assert await client.result(await client.add("s", [2] * 20)) == oracle([2] * 20, 8)
    assert successor.refusals == []


async def test_a_successor_with_other_pools_goes_on_with_what_fits(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002, num_device_blocks=200)
    server, client = await harness.scheduler(), await harness.client()
    fits = await client.add("fits", [1] * 20, max_tokens=60)
    long = await client.add("long", [2] * 20, max_tokens=500)
    never = await client.add("never", [3] * 200, max_tokens=10)
    await client.wait_until(lambda: fits.token_ids[0] and long.token_ids[0] and never.token_ids[0])
    await worker.kill()
    await harness.worker(num_device_blocks=30, max_model_len=100)
    assert await client.result(fits) == oracle([1] * 20, 60)
    assert await client.result(long) == oracle([2] * 20, 80)
    assert long.reasons == {0: sampling_pb2.FINISH_REASON_LENGTH}
    with pytest.raises(BlockyardError, match="never fit") as caught:
        await client.result(never)
    assert caught.value.reason is Reason.NEVER_FITS
    await client.wait_until(lambda: client.facts is not None and client.facts.max_model_len == 100)
    assert await client.result(await client.add("s", [2] * 20)) == oracle([2] * 20, 8)
    [stats] = server.service.stats()
    assert stats.num_device_blocks == 29
    await until_idle(server)


async def test_a_refused_step_is_a_pause(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=500)
    for epoch in (1, 2):
        begin = len(stream.token_ids[0])
        await client.wait_until(lambda: len(stream.token_ids[0]) > begin + 10)  # noqa: B023
        assert (await client.status()).replicas[0].epoch == epoch
        worker.refuse_next = "block 7 is out of range"
    assert await client.result(stream) == oracle([1] * 20, 500)
    assert (await client.status()).replicas[0].epoch == 3
    await until_idle(server)


async def test_a_refusal_that_comes_again_fails_the_requests_of_the_step(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    worker.refuse_prompt = (9, 9, 9)
    stream = await client.add("r", [9, 9, 9], n=2)
    with pytest.raises(BlockyardError, match=r"refuses its steps: .*cannot stand this prompt") as caught:
        await client.result(stream)
    assert caught.value.reason is Reason.BUG
    assert await client.result(await client.add("s", [2] * 20)) == oracle([2] * 20, 8)
    assert (await client.status()).replicas[0].epoch == 3
    await until_idle(server)


async def test_a_refusal_that_names_its_request_costs_neither_the_replica_nor_others(harness: Harness) -> None:
    """Not even when it comes before the epoch has answered anything, again and again."""
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    worker.refuse_prompt, worker.names_refused = (9, 9, 9), True
    innocent = await client.add("i", [1] * 20, max_tokens=3)
    wrong = [await client.add(f"r{number}", [9, 9, 9]) for number in range(4)]
    for stream in wrong:
        with pytest.raises(BlockyardError, match=r"refuses its steps: new_sequences\[#?\d*\].block_ids") as caught:
            await client.result(stream)
        assert caught.value.reason is Reason.BUG
    assert await client.result(innocent) == oracle([1] * 20, 3)
    [engine] = server.service.engines
    assert (engine.breaker.num_unsound_epochs, engine.breaker.pause_seconds) == (0, 0)
    await until_idle(server)


async def test_a_worker_that_hangs_is_given_up_and_taken_over_when_it_answers_again(
    harness: Harness, settings: Settings
) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server = await harness.scheduler(settings(step_deadline_seconds=0.3))
    client = await harness.client()
    stream = await client.add("r", [1] * 20, n=2, max_tokens=300)
    await client.wait_until(lambda: stream.token_ids[1])
    worker.hang()
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    num_tokens = len(stream.token_ids[0])
    worker.go_on()
    assert await client.result(stream) == oracle([1] * 20, 300, n=2)
    assert num_tokens < 300
    assert (await client.status()).replicas[0].epoch == 2
    assert worker.refusals == []
    await until_idle(server)


async def test_an_answer_that_cannot_be_is_a_pause(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=100)
    await client.wait_until(lambda: stream.token_ids[0])
    worker.skew_next = True
    assert await client.result(stream) == oracle([1] * 20, 100)
    assert (await client.status()).replicas[0].epoch == 2
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
    assert stream.errors[0].reason is Reason.NOT_FINITE
    assert stream.errors[0].message == "failed on request"
    assert await client.result(other) == oracle([2] * 20, 60)
    await until_idle(server)


async def test_why_a_sequence_failed_is_kept_with_its_request(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, n=2, max_tokens=60)
    await client.wait_until(lambda: stream.token_ids[1])
    assert stream.first_sequence_id is not None
    worker.fail_sequences.add(stream.first_sequence_id + 1)
    await client.wait_until(lambda: 1 in stream.reasons)
    other = await harness.client("other")
    early = await other.read_again("r", n=2)
    await client.result(stream)
    assert await other.result(early) == stream.token_ids
    assert stream.token_ids[0] == oracle([1] * 20, 60, n=2)[0]
    late = await (third := await harness.client("third")).read_again("r", n=2)
    assert await third.result(late) == stream.token_ids
    for reader in (stream, early, late):
        assert [(index, error.reason) for index, error in reader.errors.items()] == [(1, Reason.NOT_FINITE)]
    await until_idle(server)


async def test_a_new_scheduler_knows_why_a_sequence_failed_before(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.001)
    first, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, n=2, max_tokens=300)
    await client.wait_until(lambda: stream.token_ids[1])
    assert stream.first_sequence_id is not None
    worker.fail_sequences.add(stream.first_sequence_id)
    await client.wait_until(lambda: 0 in stream.reasons)
    await first.stop()
    server = await harness.scheduler()
    client = await harness.client()
    again = await client.resubmit(stream)
    await client.result(again)
    assert again.token_ids[1] == oracle([1] * 20, 300, n=2)[1]
    other = await harness.client("other")
    read = await other.read_again("r", n=2)
    await other.result(read)
    assert read.reasons[0] == sampling_pb2.FINISH_REASON_ERROR
    assert read.errors[0].message == "failed on request"
    await until_idle(server)


async def test_an_engine_that_stops_ends_with_its_epoch(harness: Harness) -> None:
    # A worker that stops at the same moment may break the epoch just as the engine is cancelled, and hide that from it.
    worker = await harness.worker()
    server = await harness.scheduler()
    await harness.client()
    [running] = server.service._running.values()
    server.service.close()
    await worker.kill()
    await asyncio.wait_for(running, 10)


async def test_an_error_before_a_step_is_published_costs_no_token(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    due = [faults.Fault(faults.BEFORE_PUBLISH, faults.Action.ERROR, number) for number in (3, 9)]
    monkeypatch.setattr(faults, "reach", faults.Faults(due).reach)
    stream = await client.add("r", [3] * 40, n=2, max_tokens=50)
    assert await client.result(stream) == oracle([3] * 40, 50, n=2)
    assert (await client.status()).num_recoveries == len(due)
    await until_idle(server)
