from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from blockyard.common.v1 import status_pb2
from blockyard.contract.models import Task
from blockyard.contract.parallel import Parallel
from blockyard.contract.scheduling import ModelFacts, Readiness
from blockyard.contract.workers import AvailableBlocks, CacheInfo, CachePlan, WorkerState
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2
from scheduler_service.config import SchedulerConfiguration
from scheduler_service.replicas.cache_plan import find_least, plan_cache
from scheduler_service.replicas.epoch_failure import Misconfigured, Unusable
from scheduler_service.replicas.rank import configuration_digest
from scheduler_service.replicas.replica import Replica
from scheduler_service.replicas.steps.answer_checks import AnswerLimits
from scheduler_service.replicas.worker_link import WorkerLink
from tests.kit.fakes.fake_worker import FakeWorker, FakeWorkerOptions
from tests.kit.processes.spans import recorded_spans

LIMITS = AnswerLimits(100, 4096, 256)

Settings = Callable[..., SchedulerConfiguration]
AVAILABLE = AvailableBlocks(block_size=16, num_device_blocks=11, num_host_blocks=5, cache_block_bytes=100)


class Reports:
    """What a replica reported, and a way to wait for it."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.last = Readiness(ready=False)
        self._changed = asyncio.Event()

    def __call__(self, readiness: Readiness) -> None:
        self.messages.append(readiness.message)
        self.last = readiness
        self._changed.set()

    async def wait_for(self, part: str) -> None:
        async with asyncio.timeout(10):
            while not any(part in message for message in self.messages):
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def replica_of(configuration: SchedulerConfiguration) -> AsyncIterator[tuple[Replica, Reports]]:
    link, reports = WorkerLink(configuration.service.worker_address), Reports()
    try:
        yield Replica([link], configuration, reports), reports
    finally:
        await link.close()


async def set_up(replica: Replica) -> tuple[ModelFacts, CacheInfo]:
    return await asyncio.wait_for(replica.set_up(), 10)


def worker_of(configuration: SchedulerConfiguration, **options: int) -> FakeWorker:
    return FakeWorker(FakeWorkerOptions(**options), configuration.service.worker_address)


def test_the_length_is_the_models_where_it_fits(settings: Settings) -> None:
    assert plan_cache(settings(), AVAILABLE, 100) == CachePlan(16, 11, 5, 100, 2048, 256)


def test_the_length_is_what_fits_where_the_model_has_more(settings: Settings) -> None:
    assert plan_cache(settings(), AVAILABLE, 1000).max_model_len == 160


def test_settings_go_before_what_fits(settings: Settings) -> None:
    plan = plan_cache(settings(num_device_blocks=5, num_host_blocks=0, max_model_len=30), AVAILABLE, 1000)
    assert (plan.num_device_blocks, plan.num_host_blocks, plan.max_model_len) == (5, 0, 30)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 1001}, "--max-model-len 1001 is above the 1000 tokens of the model"),
        ({"max_model_len": 161}, "above the 160 tokens that 11 device blocks hold"),
        ({"num_device_blocks": 1}, "no room for any token"),
    ],
)
def test_what_cannot_be_is_told(settings: Settings, changes: dict[str, int], message: str) -> None:
    with pytest.raises(Misconfigured, match=message):
        plan_cache(settings(**changes), AVAILABLE, 1000)


def test_the_digest_covers_all_that_a_worker_is_told(settings: Settings) -> None:
    told = {
        "model": "other",
        "revision": "other",
        "device": "cpu",
        "dtype": "float32",
        "quantization": "int8",
        "task": "embed",
        "device_memory_utilization": 0.5,
        "swap_space_gib": 2.0,
        "block_size": 32,
        "num_device_blocks": 7,
        "num_host_blocks": 7,
        "max_model_len": 7,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 7,
    }
    digests = {configuration_digest(settings(**{name: value}), Parallel()) for name, value in told.items()}
    drafts = ({}, {"max_draft_tokens": 7}, {"max_draft_rows": 7})
    digests |= {configuration_digest(settings(speculation="auto", **each), Parallel()) for each in drafts}
    assert len(digests) == len(told) + len(drafts)
    assert configuration_digest(settings(), Parallel()) not in digests


def test_the_digest_covers_nothing_else(settings: Settings) -> None:
    same = settings(enable_prefix_caching=False, preemption_mode="swap", max_prefill_chunk=5, debug_integrity=False)
    assert configuration_digest(settings(max_draft_tokens=5), Parallel()) == configuration_digest(same, Parallel())
    assert configuration_digest(same, Parallel()) == configuration_digest(settings(), Parallel())


def test_drafts_are_planned_for_where_they_are_asked_for(settings: Settings) -> None:
    plan = plan_cache(settings(speculation="ngram", max_draft_tokens=40), AVAILABLE, 100)
    # No sequence can have more than a step.
    assert (plan.max_draft_tokens, plan.max_draft_rows) == (32, 32)
    plan = plan_cache(settings(speculation="auto", max_draft_rows=64, pipeline_parallel_size=2), AVAILABLE, 100)
    assert (plan.max_draft_tokens, plan.max_draft_rows) == (0, 0)


def test_states_are_planned_for(settings: Settings) -> None:
    """Each sequence has their blocks besides, no sequence drafts, and a stage with fewer has as many as the others."""
    available = replace(AVAILABLE, num_state_blocks=3)
    plan = plan_cache(settings(speculation="ngram"), available, 1000)
    assert (plan.num_state_blocks, plan.max_model_len) == (3, 7 * 16)
    assert (plan.max_draft_tokens, plan.max_draft_rows) == (0, 0)
    without_attention = replace(available, kv_windows=())
    assert plan_cache(settings(), without_attention, 1000).max_model_len == 1000
    assert find_least([AVAILABLE, available]).num_state_blocks == 3
    with pytest.raises(Misconfigured, match="no room for any token"):
        plan_cache(settings(), replace(available, num_state_blocks=11), 1000)


async def test_a_new_worker_is_brought_up(configuration: SchedulerConfiguration) -> None:
    async with worker_of(configuration) as worker, replica_of(configuration) as (replica, reports):
        facts, cache = await set_up(replica)
        assert worker.state == status_pb2.WORKER_STATE_CACHE_READY
        assert worker.configuration_digest == configuration_digest(configuration, Parallel())
        max_num_seqs = configuration.scheduler.max_num_seqs
        assert facts == ModelFacts("0" * 64, 100, 4096, 16, "hash", True, max_num_seqs, task=Task.GENERATE)
        assert (cache.num_device_blocks, cache.num_host_blocks) == (1000, 100)
        assert replica.ranks[0].state is WorkerState.CACHE_READY
        assert replica.message == ""
        assert reports.messages == ["the worker is loading the model: 0%"]


async def test_an_absent_worker_is_waited_for_and_told_once(
    configuration: SchedulerConfiguration, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with replica_of(configuration) as (replica, reports):
        setting_up = asyncio.create_task(replica.set_up())
        await reports.wait_for("no worker answers at unix:")
        assert replica.ranks[0].state is WorkerState.UNREACHABLE
        async with worker_of(configuration):
            await asyncio.wait_for(setting_up, 10)
        assert sum("no worker" in message for message in reports.messages) == 1
        assert sum(record.message == "the replica is not ready" for record in caplog.records) == 1


async def test_a_worker_that_is_starting_too_is_no_warning_but_one_that_was_lost_is(
    configuration: SchedulerConfiguration, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with replica_of(configuration) as (replica, reports):
        setting_up = asyncio.create_task(replica.set_up())
        await reports.wait_for("no worker answers")
        async with worker_of(configuration):
            await asyncio.wait_for(setting_up, 10)
            replica.open_steps(LIMITS, lambda: 10.0).cancel()
        reports.messages.clear()
        setting_up = asyncio.create_task(replica.set_up())
        await reports.wait_for("no worker answers")
        setting_up.cancel()
    levels = [record.levelname for record in caplog.records if record.message == "the replica is not ready"]
    assert levels == ["INFO", "WARNING"]


async def test_each_loss_of_a_worker_is_told(
    configuration: SchedulerConfiguration, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica_of(configuration) as (replica, reports):
        for _ in range(2):
            async with worker_of(configuration):
                await set_up(replica)
                replica.open_steps(LIMITS, lambda: 10.0).cancel()
            reports.messages.clear()
            setting_up = asyncio.create_task(replica.set_up())
            await reports.wait_for("no worker answers")
            setting_up.cancel()
            await asyncio.wait({setting_up})
    assert sum(record.message == "the replica is not ready" for record in caplog.records) == 2


async def test_a_worker_that_is_gone_is_looked_for_often(
    configuration: SchedulerConfiguration, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []

    async def note(delay: float) -> None:
        delays.append(delay)
        if len(delays) == 5:
            raise asyncio.CancelledError

    async with replica_of(configuration) as (replica, _):
        monkeypatch.setattr("scheduler_service.replicas.replica.asyncio.sleep", note)
        with pytest.raises(asyncio.CancelledError):
            await replica.set_up()
    assert delays == [0.1, 0.2, 0.25, 0.25, 0.25]


async def test_a_worker_that_fails_is_asked_less_and_less_often(
    configuration: SchedulerConfiguration, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays: list[float] = []

    async def note(delay: float) -> None:
        delays.append(delay)
        if len(delays) == 9:
            raise asyncio.CancelledError

    async with worker_of(configuration) as worker, replica_of(configuration) as (replica, _):
        worker.state = status_pb2.WORKER_STATE_RUNNING  # it refuses InitDevice
        worker.configuration_digest = configuration_digest(configuration, Parallel())
        monkeypatch.setattr("scheduler_service.replicas.replica.asyncio.sleep", note)
        with pytest.raises(asyncio.CancelledError):
            await replica.set_up()
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


class BrokenModel(FakeWorker):
    """A worker that begins to load its model and fails each time."""

    async def LoadModel(self, request: worker_pb2.LoadModelRequest, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.LoadModelResponse(progress=worker_pb2.LoadProgress(done_bytes=0, total_bytes=1000))
        raise BlockyardError(Reason.MODEL_NOT_LOADED, "a shard is cut off")


async def test_a_model_that_cannot_be_loaded_needs_a_repair_after_each_attempt(
    configuration: SchedulerConfiguration, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[tuple[bool, str]] = []

    async def note(_delay: float) -> None:
        states.append((reports.last.needs_repair, reports.last.message.rpartition(": ")[2]))
        if len(states) == 2:
            raise asyncio.CancelledError

    worker = BrokenModel(FakeWorkerOptions(), configuration.service.worker_address)
    async with worker, replica_of(configuration) as (replica, reports):
        monkeypatch.setattr("scheduler_service.replicas.replica.asyncio.sleep", note)
        with pytest.raises(asyncio.CancelledError):
            await replica.set_up()
    assert states == [(True, "a shard is cut off")] * 2
    assert [message.rpartition(": ")[2] for message in reports.messages] == ["0%", "a shard is cut off"] * 2


@pytest.mark.parametrize(
    "state",
    [
        status_pb2.WORKER_STATE_DEVICE_READY,
        status_pb2.WORKER_STATE_LOADED,
        status_pb2.WORKER_STATE_CACHE_READY,
        status_pb2.WORKER_STATE_RUNNING,
    ],
)
async def test_a_worker_of_the_same_configuration_is_taken_over(
    configuration: SchedulerConfiguration, state: int
) -> None:
    async with worker_of(configuration) as worker, replica_of(configuration) as (replica, _):
        worker.configuration_digest = configuration_digest(configuration, Parallel())
        worker.state, worker.epoch = state, 8
        if state >= status_pb2.WORKER_STATE_CACHE_READY:
            worker.cache = worker_pb2.CacheInfo(
                block_size=8, num_device_blocks=50, num_host_blocks=3, max_model_len=99, determinism_id="d"
            )
        _, cache = await set_up(replica)
        assert not worker.stopping.is_set()
        assert cache.num_device_blocks == (50 if state >= status_pb2.WORKER_STATE_CACHE_READY else 1000)
        assert cache.block_size == (8 if state >= status_pb2.WORKER_STATE_CACHE_READY else 16)
        steps = replica.open_steps(LIMITS, lambda: 10.0)
        assert steps.epoch == 9
        steps.cancel()


async def test_a_worker_of_another_configuration_is_ended_and_its_successor_taken(
    configuration: SchedulerConfiguration,
) -> None:
    async with replica_of(configuration) as (replica, reports):
        async with worker_of(configuration) as worker:
            worker.configuration_digest, worker.state = "other", status_pb2.WORKER_STATE_LOADED
            setting_up = asyncio.create_task(replica.set_up())
            await asyncio.wait_for(worker.stopping.wait(), 10)
            await reports.wait_for("another configuration")
        async with worker_of(configuration) as successor:
            await asyncio.wait_for(setting_up, 10)
            assert not successor.stopping.is_set()
            assert successor.configuration_digest == configuration_digest(configuration, Parallel())


async def test_a_length_that_cannot_be_is_told_and_the_worker_not_asked_again(settings: Settings) -> None:
    configuration = settings(max_model_len=5000)
    async with worker_of(configuration) as worker, replica_of(configuration) as (replica, reports):
        setting_up = asyncio.create_task(replica.set_up())
        await reports.wait_for("--max-model-len 5000 is above the 4096 tokens of the model")
        asked = worker.num_profiles
        heard = worker.num_infos
        async with asyncio.timeout(10):
            while worker.num_infos < heard + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert worker.num_profiles == asked == 1
        assert worker.plans == []
        setting_up.cancel()
        await asyncio.wait({setting_up})


async def test_what_needs_a_repair_ends_it_where_nobody_waits_for_one(settings: Settings) -> None:
    configuration = settings(max_model_len=5000)
    configuration = replace(configuration, service=replace(configuration.service, wait_for_repair=False))
    async with replica_of(configuration) as (replica, reports):
        setting_up = asyncio.create_task(replica.set_up())
        await reports.wait_for("no worker answers")
        async with worker_of(configuration):
            with pytest.raises(Unusable, match="--max-model-len 5000 is above the 4096 tokens of the model"):
                await asyncio.wait_for(setting_up, 10)


async def test_the_same_worker_is_set_up_again_in_a_higher_epoch(configuration: SchedulerConfiguration) -> None:
    async with worker_of(configuration) as worker, replica_of(configuration) as (replica, _):
        worker.epoch = 41
        for epoch in (42, 43):
            await set_up(replica)
            steps = replica.open_steps(LIMITS, lambda: 10.0)
            assert steps.epoch == replica.epoch == epoch
            worker.epoch = epoch
            steps.cancel()


async def test_another_api_version_is_told(configuration: SchedulerConfiguration) -> None:
    async with worker_of(configuration) as worker, replica_of(configuration) as (replica, reports):
        worker.api_version = "v2"
        setting_up = asyncio.create_task(replica.set_up())
        await reports.wait_for("api version 'v2'")
        setting_up.cancel()
        await asyncio.wait({setting_up})


async def test_a_start_is_one_trace_with_a_span_for_each_call(configuration: SchedulerConfiguration) -> None:
    steps = ["init_device", "load_model", "determine_num_available_blocks", "initialize_cache"]
    with recorded_spans() as recorder:
        async with worker_of(configuration):
            async with replica_of(configuration) as (replica, _):
                facts, cache = await set_up(replica)
            seen, start = recorder.seen, recorder.seen.one("start-up")
            assert [span.name for span in seen.spans if span is not start and span.name != "start-up"] == steps
            assert start.parent_id == ""
            assert {span.parent_id for span in seen.spans if span.name != "start-up"} == {start.span_id}
            assert start.attributes["worker_address"] == configuration.service.worker_address
            assert seen.one("load_model").attributes["parameter_bytes"] > 0
            assert seen.one("initialize_cache").attributes["num_device_blocks"] == cache.num_device_blocks
            assert not [span for span in seen.spans if span.error]
            # A worker that is taken over as it is does not start.
            async with replica_of(configuration) as (successor, _):
                assert (await set_up(successor))[0] == facts
        recorder.check_all_ended()
        assert len(recorder.seen.spans) == len(steps) + 1


class LateWeights(FakeWorker):
    """Has its weights at the second time that it is asked to load them."""

    is_asked_again = False

    async def LoadModel(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.LoadModelResponse]:
        """Loads, or fails."""
        if not self.is_asked_again:
            self.is_asked_again = True
            raise BlockyardError(Reason.MODEL_NOT_LOADED, "no weights")
        async for event in super().LoadModel(request, context):
            yield event


async def test_a_start_that_fails_says_so_in_its_trace(configuration: SchedulerConfiguration) -> None:
    with recorded_spans() as recorder:
        async with (
            LateWeights(FakeWorkerOptions(), configuration.service.worker_address),
            replica_of(configuration) as (replica, _),
        ):
            await set_up(replica)
        recorder.check_all_ended()
        failed, whole = recorder.seen.named("start-up")
        assert (failed.error, whole.error) == ("MODEL_NOT_LOADED", "")
        broken, loaded = recorder.seen.named("load_model")
        assert (broken.parent_id, loaded.parent_id) == (failed.span_id, whole.span_id)
        assert broken.error == failed.error
