"""What the scheduler answers operators: status, prefix caches, log levels, profiles, its state."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import Reason
from scheduler_service.requests.failure_history import RecoveryRecord
from tests.kit.fakes.fake_operations import MAX_STEPS
from tests.kit.oracles.token_oracle import oracle
from tests.kit.refusals import refused
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from tests.unit.scheduler_service.conftest import Harness, Operator

    Settings = Callable[..., SchedulerConfiguration]

DEBUG, INFO = administration_pb2.LOG_LEVEL_DEBUG, administration_pb2.LOG_LEVEL_INFO


async def two_replicas(harness: Harness, settings: Settings) -> Operator:
    address = harness.configuration.service.worker_address
    for name in ("", "-2"):
        await harness.worker(name)
    server = await harness.scheduler(settings(worker_address=f"{address},{address}-2"))
    await until(lambda: len(server.service.dispatcher.ready_engines) == 2)
    return await harness.operator()


# Status.


async def test_status_tells_totals_that_grow(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    before = (await operator.status()).scheduler
    assert await client.result(await client.add("r", [1] * 20, max_tokens=30)) == oracle([1] * 20, 30)
    response = await operator.status()
    assert not response.HasField("gateway")
    now = response.scheduler
    [replica] = now.replicas
    assert (replica.num_prompt_tokens, replica.num_completion_tokens) == (20, 30)
    assert replica.num_steps >= 30 > before.replicas[0].num_steps == 0
    assert replica.step_time.ToNanoseconds() >= 30 * 1e6
    assert now.uptime.ToNanoseconds() > before.uptime.ToNanoseconds() > 0
    assert (replica.block_size, replica.drain_state) == (16, status_pb2.DRAIN_STATE_UNSPECIFIED)
    [worker] = replica.workers
    assert (worker.weights_bytes, worker.device_cache_bytes, worker.host_cache_bytes) == (1000, 1000 << 10, 100 << 10)
    assert (now.num_requests, now.num_waiting_requests, now.num_waiting_tokens, now.num_gateways) == (0, 0, 0, 1)
    assert now.version


async def test_status_tells_the_adapters_of_requests_that_run_and_that_wait(
    harness: Harness, settings: Settings
) -> None:
    await harness.worker(step_seconds=0.002)
    # One slot: the replica takes one request whose adapter waits for it, and the next one stays in the queue.
    await harness.scheduler(settings(max_loras=1, lora_patience_seconds=1000.0))
    client, operator = await harness.client(), await harness.operator()
    names = ("poet", "sailor", "unused")
    for name in names:
        await operator.load_lora(name, f"/adapters/{name}")
    await client.wait_until(lambda: client.loras.keys() == {*names})
    running = await client.add("running", [1] * 20, max_tokens=100_000, lora=client.loras["sailor"])
    await client.wait_until(lambda: running.token_ids[0])
    taken = await client.add("taken", [1] * 20, max_tokens=3, lora=client.loras["poet"])
    waiting = await client.add("waiting", [1] * 20, max_tokens=3, lora=client.loras["poet"])
    await client.wait_until(lambda: waiting.first_sequence_id is not None)
    async with asyncio.timeout(20):
        # A request is accepted before a replica takes it.
        while list((status := (await operator.status()).scheduler).running_loras) != ["poet", "sailor"]:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert status.max_loras == 1
    assert list(status.waiting_loras) == ["poet"]
    await client.cancel("running")
    await client.result(taken)
    await client.result(waiting)
    status = (await operator.status()).scheduler
    assert (list(status.running_loras), list(status.waiting_loras)) == ([], [])


async def test_status_tells_how_far_the_start_of_a_worker_is(harness: Harness) -> None:
    worker = await harness.worker()
    worker.pause_at = 500
    await harness.scheduler()
    operator = await harness.operator()

    async def start() -> status_pb2.StartProgress | None:
        [replica] = (await operator.status()).scheduler.replicas
        [told] = replica.workers
        return told.start if told.HasField("start") else None

    expected = status_pb2.StartProgress(phase=status_pb2.START_PHASE_LOAD_MODEL, done_bytes=500, total_bytes=1000)
    async with asyncio.timeout(20):
        while await start() != expected:  # noqa: ASYNC110 - it is asked as an operator asks it
            await asyncio.sleep(0.005)
    worker.may_load.set()
    await (await harness.client()).wait_until_ready()
    assert await start() is None


async def test_status_tells_who_waits_and_what_was_lost(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", [1] * 20, max_tokens=300)
    await client.wait_until(lambda: stream.token_ids[0])
    await worker.kill()
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    late = await client.add("late", [2] * 7)
    await client.wait_until(lambda: late.first_sequence_id is not None)
    status = (await operator.status()).scheduler
    assert (status.num_requests, status.num_waiting_requests) == (2, 2)
    assert status.num_waiting_tokens >= 27
    [recovery] = status.recoveries
    assert (recovery.cause, recovery.num_requests, recovery.replica_id) == ("the worker was lost", 1, 0)
    assert recovery.num_replayed_tokens == status.num_replayed_tokens > 20
    assert status.replicas[0].workers[0].state in (
        status_pb2.WORKER_STATE_RUNNING,
        status_pb2.WORKER_STATE_UNREACHABLE,
    )


async def test_the_latest_recoveries_are_kept_and_no_more(harness: Harness) -> None:
    await harness.worker()
    server = await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    dispatcher = server.service.dispatcher
    for number in range(20):
        dispatcher.recovery_log.add(RecoveryRecord(0.0, 0, f"cause {number}", 1, number))
    causes = [recovery.cause for recovery in (await operator.status()).scheduler.recoveries]
    assert causes == [f"cause {number}" for number in range(19, 3, -1)]
    assert (await client.status()).num_recoveries == 20


# Names.


async def test_a_replica_has_several_names(harness: Harness) -> None:
    worker = await harness.worker()
    await harness.scheduler()
    await harness.client()
    operator = await harness.operator()
    for name in ("0", worker.address, "fake", worker.incarnation, ""):
        answer = await operator.stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(replica=name))
        assert [reset.replica_id for reset in answer.replicas] == [0], name
        assert (await operator.undrain(name)).replica.replica_id == 0


async def test_unknown_and_ambiguous_names_are_told_which_there_are(harness: Harness, settings: Settings) -> None:
    operator = await two_replicas(harness, settings)
    for name, told in (
        ("7", "there is no replica '7'"),
        ("", "must name one of several replicas"),
        ("fake", "must name one of several replicas"),
    ):
        error = await refused(operator.drain(name))
        assert error.reason is Reason.FIELD_INVALID
        assert error.violations[0].field == "replica"
        assert told in error.message
        assert "0 (unix:" in error.message and "1 (unix:" in error.message


@pytest.mark.parametrize("method", ["DrainGateway", "UndrainGateway", "ListMisses"])
async def test_what_is_a_gateways_is_not_the_schedulers(harness: Harness, method: str) -> None:
    await harness.scheduler()
    operator = await harness.operator()
    request = getattr(admin_pb2, f"{method}Request")()
    error = await refused(getattr(operator.stub, method)(request))
    assert error.reason is Reason.FEATURE_DISABLED


# The prefix cache.


async def test_a_reset_forgets_what_nobody_uses(harness: Harness) -> None:
    await harness.worker(step_seconds=0.001)
    server = await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    prompt, other = [5] * 64, [6] * 64
    assert await client.result(await client.add("first", prompt)) == oracle(prompt, 8)
    again = await client.add("again", prompt)
    assert await client.result(again) == oracle(prompt, 8)
    assert again.num_cached_tokens == 63
    running = await client.add("running", other, max_tokens=1000)
    await client.wait_until(lambda: running.token_ids[0])
    [reset] = (await operator.stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())).replicas
    assert reset.num_forgotten_device_blocks >= 4
    assert reset.num_kept_device_blocks >= 4
    forgotten = await client.add("forgotten", prompt)
    assert await client.result(forgotten) == oracle(prompt, 8)
    assert forgotten.num_cached_tokens == 0
    kept = await client.add("kept", other)
    assert await client.result(kept) == oracle(other, 8)
    assert kept.num_cached_tokens == 63
    assert await client.result(running) == oracle(other, 1000)
    server.service.engines[0].scheduler.check_integrity()  # type: ignore[union-attr]


async def test_only_the_replica_that_is_named_forgets(harness: Harness, settings: Settings) -> None:
    operator = await two_replicas(harness, settings)
    client = await harness.client()
    for number in range(4):
        prompt = [number + 1] * 64
        assert await client.result(await client.add(f"r{number}", prompt)) == oracle(prompt, 8)
    one = await operator.stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(replica="1"))
    assert [reset.replica_id for reset in one.replicas] == [1]
    both = await operator.stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
    assert [reset.replica_id for reset in both.replicas] == [0, 1]
    assert both.replicas[1].num_forgotten_device_blocks == 0


async def test_without_pools_there_is_nothing_to_forget(harness: Harness) -> None:
    await harness.scheduler()
    operator = await harness.operator()
    assert not (await operator.stub.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())).replicas


# Log levels.


async def test_log_levels_change_in_all_processes_or_in_one(harness: Harness) -> None:
    worker = await harness.worker()
    await harness.scheduler()
    await harness.client()
    operator = await harness.operator()
    logging.getLogger("blockyard").setLevel("INFO")
    answer = await operator.stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level=DEBUG))
    told = {each.process: (each.previous_level, each.message) for each in answer.processes}
    assert told == {"scheduler": (INFO, ""), worker.address: (INFO, "")}
    assert worker.log_level == DEBUG
    assert logging.getLogger("scheduler_service").level == logging.DEBUG
    answer = await operator.stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level=INFO, process="scheduler"))
    assert [(each.process, each.previous_level) for each in answer.processes] == [("scheduler", DEBUG)]
    assert (worker.log_level, logging.getLogger("scheduler_service").level) == (DEBUG, logging.INFO)
    answer = await operator.stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level=INFO, process="0"))
    assert [each.process for each in answer.processes] == [worker.address]
    assert worker.log_level == INFO


async def test_a_worker_that_cannot_be_told_is_told_of(harness: Harness) -> None:
    await harness.scheduler()
    operator = await harness.operator()
    answer = await operator.stub.SetLogLevel(admin_pb2.SetLogLevelRequest(level=INFO))
    scheduler, worker = answer.processes
    assert (scheduler.process, scheduler.message) == ("scheduler", "")
    assert worker.message


async def test_no_level_is_refused(harness: Harness) -> None:
    await harness.scheduler()
    operator = await harness.operator()
    error = await refused(operator.stub.SetLogLevel(admin_pb2.SetLogLevelRequest(process="scheduler")))
    assert (error.reason, error.violations[0].field) == (Reason.FIELD_INVALID, "level")


# Profiles.


async def test_a_profile_comes_through_piece_by_piece(harness: Harness) -> None:
    worker = await harness.worker()
    worker.profile_pieces = tuple(bytes([number]) * 100_000 for number in range(20))
    await harness.scheduler()
    await harness.client()
    operator = await harness.operator()
    options = administration_pb2.ProfileOptions(max_steps=5)
    started = await operator.stub.StartProfile(admin_pb2.StartProfileRequest(options=options))
    assert (started.replica_id, started.options.max_steps) == (0, 5)
    assert started.options.detail == administration_pb2.PROFILE_DETAIL_STEPS
    pieces = [piece async for piece in operator.stub.StopProfile(admin_pb2.StopProfileRequest(replica="0"))]
    assert pieces[0].summary.num_bytes == 2_000_000
    assert not pieces[0].data
    assert not any(piece.HasField("summary") for piece in pieces[1:])
    assert b"".join(piece.data for piece in pieces) == b"".join(worker.profile_pieces)


async def test_what_a_worker_says_of_profiles_is_passed_on(harness: Harness) -> None:
    await harness.worker()
    await harness.scheduler()
    await harness.client()
    operator = await harness.operator()

    async def stop() -> None:
        async for _ in operator.stub.StopProfile(admin_pb2.StopProfileRequest()):
            pass

    assert (await refused(stop())).reason is Reason.WRONG_STATE
    most = administration_pb2.ProfileOptions(max_steps=10**6)
    started = await operator.stub.StartProfile(admin_pb2.StartProfileRequest(options=most))
    assert started.options.max_steps == MAX_STEPS
    error = await refused(operator.stub.StartProfile(admin_pb2.StartProfileRequest()))
    assert (error.reason, error.message) == (Reason.WRONG_STATE, "a profile is recorded already")


async def test_no_worker_gives_no_profile(harness: Harness) -> None:
    await harness.scheduler()
    operator = await harness.operator()
    error = await refused(operator.stub.StartProfile(admin_pb2.StartProfileRequest()))
    assert error.reason is Reason.NO_READY_WORKER


# State.


async def test_state_tells_each_request_and_what_it_holds(harness: Harness, settings: Settings) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler(settings(max_num_seqs=2))
    client, operator = await harness.client(), await harness.operator()
    runs = await client.add("acme/runs", [1] * 40, n=2, max_tokens=500, tenant="acme", priority=3)
    await client.wait_until(lambda: runs.token_ids[1])
    waits = await client.add("waits", [2] * 20, tenant="acme")
    await client.wait_until(lambda: waits.first_sequence_id is not None)
    state = (await operator.stub.DumpState(admin_pb2.DumpStateRequest())).state
    assert (state.num_requests, state.gateway_ids) == (2, ["gateway"])
    first, second = state.requests
    assert (first.request_id, first.tenant, first.priority) == ("acme/runs", "acme", 3)
    assert (first.num_prompt_tokens, first.max_length, first.replica_id) == (40, 540, 0)
    assert list(first.readers) == ["gateway#1"]
    assert first.age.ToNanoseconds() > 0
    assert [sequence.status for sequence in first.sequences] == ["RUNNING", "RUNNING"]
    for sequence in first.sequences:
        assert sequence.num_tokens > 40
        assert 40 <= sequence.num_computed_tokens <= sequence.num_scheduled_tokens
        assert sequence.num_device_blocks >= 3
        assert sequence.num_host_blocks == 0
    assert second.request_id == "waits"
    assert not second.HasField("replica_id")
    assert [sequence.status for sequence in second.sequences] == ["WAITING"]
    [replica] = state.replicas
    assert all(step.num_tokens >= step.num_sequences > 0 for step in replica.steps)
    assert state.status.num_requests == 2
    await client.cancel("acme/runs")


async def test_state_tells_no_more_requests_than_asked_for(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    streams = [await client.add(f"r{number}", [number + 1], max_tokens=300) for number in range(5)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    state = (await operator.stub.DumpState(admin_pb2.DumpStateRequest(max_requests=2))).state
    assert [request.request_id for request in state.requests] == ["r0", "r1"]
    assert state.num_requests == 5


async def test_state_of_a_lost_worker_tells_who_recovers(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    await harness.scheduler()
    client, operator = await harness.client(), await harness.operator()
    stream = await client.add("r", [1] * 20, max_tokens=300)
    await client.wait_until(lambda: stream.token_ids[0])
    await worker.kill()
    await client.wait_until(lambda: client.readiness is not None and not client.readiness.ready)
    [request] = (await operator.stub.DumpState(admin_pb2.DumpStateRequest())).state.requests
    assert request.is_recovering
    assert not request.HasField("replica_id")


def test_state_has_no_place_for_what_is_said() -> None:
    """Ids are as good as text to who has the tokenizer."""
    messages = [admin_pb2.SchedulerState.DESCRIPTOR]
    for message in messages:
        for field in message.fields:
            if field.message_type is not None:
                messages += [field.message_type] if field.message_type not in messages else []
            else:
                assert field.type != field.TYPE_BYTES, field.full_name
                assert not field.is_repeated or field.type == field.TYPE_STRING, field.full_name
