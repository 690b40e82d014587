"""What the gateway's /metrics tell of the scheduler, and that no scrape depends on it."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc
import pytest

from blockyard.common.v1 import status_pb2
from gateway.codec.readings import decode_reading
from gateway.observe.scheduler_readings import MAX_AGE_SECONDS, SchedulerReadings
from gateway.observe.vllm_metrics import CATALOGUE as VLLM
from gateway.readings import ReplicaReading, SchedulerReading
from gateway.server import Server
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.processes.scrape import Scrape
from tests.unit.gateway.harness import configuration, demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

READING = SchedulerReading(3, 5, (ReplicaReading(0, 200, 0.25, 100, 40, 2),))
STATUS = status_pb2.SchedulerStatus(
    num_requests=8,
    num_waiting_requests=4,
    replicas=[
        status_pb2.ReplicaStatus(
            replica_id=1,
            device_blocks=status_pb2.BlockPoolStatus(num_blocks=200, num_free_blocks=150, num_cached_blocks=20),
            block_size=16,
            num_waiting_sequences=1,
            num_queried_tokens=100,
            num_cached_tokens=40,
            num_preemptions=2,
        ),
        status_pb2.ReplicaStatus(replica_id=2),
        status_pb2.ReplicaStatus(
            replica_id=3,
            device_blocks=status_pb2.BlockPoolStatus(num_blocks=600, num_free_blocks=0),
            block_size=16,
        ),
    ],
    max_loras=4,
    running_loras=["poet", "sailor"],
    waiting_loras=["sailor"],
)


class HandLink:
    """A link that answers what the test says."""

    def __init__(self) -> None:
        self.takes_requests = True
        self.num_asked = 0
        self.answers: asyncio.Queue[SchedulerReading | None] = asyncio.Queue()

    async def read_scheduler(self, timeout_seconds: float) -> SchedulerReading:
        self.num_asked += 1
        if (answer := await self.answers.get()) is None:
            raise _Away
        return answer


class _Away(grpc.RpcError):
    """What a call raises that nobody answers."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_waits_at_replicas_has_been_taken() -> None:
    replicas = (ReplicaReading(1, 200, 0.25, 100, 40, 2), ReplicaReading(3, 600, 1.0, 0, 0, 0))
    assert decode_reading(STATUS) == SchedulerReading(3, 5, replicas, 16, 4, ("poet", "sailor"), ("sailor",))
    assert decode_reading(status_pb2.SchedulerStatus()) == SchedulerReading(0, 0, ())


def test_the_use_of_all_blocks_weighs_replicas_by_their_size() -> None:
    reading = decode_reading(STATUS)
    assert (reading.num_blocks, reading.kv_usage) == (800, (50 + 600) / 800)
    assert (SchedulerReading(0, 0, ()).num_blocks, SchedulerReading(0, 0, ()).kv_usage) == (0, 0.0)


async def test_who_comes_together_or_soon_gets_one_answer() -> None:
    link, clock = HandLink(), Clock()
    readings = SchedulerReadings({"demo": link}, clock)
    link.answers.put_nowait(READING)
    await asyncio.gather(*(readings.refresh() for _ in range(3)))
    clock.now += MAX_AGE_SECONDS / 2
    await readings.refresh()
    assert (link.num_asked, readings.by_model) == (1, {"demo": READING})
    clock.now += MAX_AGE_SECONDS
    link.answers.put_nowait(READING._replace(num_waiting_requests=0))
    await readings.refresh()
    assert link.num_asked == 2
    assert readings.by_model["demo"].num_waiting_requests == 0


async def test_a_scheduler_that_is_away_is_not_asked_and_nothing_old_is_told() -> None:
    link, clock = HandLink(), Clock()
    readings = SchedulerReadings({"demo": link}, clock)
    link.answers.put_nowait(READING)
    await readings.refresh()
    link.takes_requests = False
    await readings.refresh()
    assert (link.num_asked, readings.by_model) == (1, {})


async def test_a_scheduler_that_does_not_answer_is_not_waited_for_by_each_scrape() -> None:
    link, clock = HandLink(), Clock()
    readings = SchedulerReadings({"demo": link}, clock)
    link.answers.put_nowait(None)
    for _ in range(3):
        await readings.refresh()
    assert (link.num_asked, readings.by_model) == (1, {})


async def test_a_scrape_of_a_process_that_does_not_run_yet_asks_nobody() -> None:
    link = HandLink()
    await asyncio.to_thread(SchedulerReadings({"demo": link}).fetch)
    assert link.num_asked == 0


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        scheduler.status.CopyFrom(STATUS)
        yield scheduler


async def scrape(port: int) -> Scrape:
    return await asyncio.to_thread(Scrape.get, f"127.0.0.1:{port}")


async def attached(gateway: Server) -> None:
    async with asyncio.timeout(10):
        await gateway.generation.model_of("").link.wait_until(
            lambda: gateway.generation.model_of("").link.takes_requests
        )


async def test_one_scrape_of_the_gateway_has_queue_blocks_and_prefix_hits(scheduler: FakeScheduler) -> None:
    gateway = Server(configuration(scheduler, gateway_metrics_port=0))
    await gateway.start()
    try:
        await attached(gateway)
        for port in (gateway.http_port, gateway.monitoring.metrics_port):
            seen = await scrape(port)
            for state, count in (("waiting", 3), ("running", 5)):
                assert seen.sum("blockyard_model_requests", model="demo", state=state) == count
            assert seen.sum("blockyard_model_kv_usage_ratio", model="demo", replica="1") == 0.25
            assert seen.sum("blockyard_model_prefix_cache_query_tokens_total", model="demo", replica="1") == 100
            assert seen.sum("blockyard_model_prefix_cache_hit_tokens_total", model="demo", replica="1") == 40
            assert not [name for name in seen.kinds if name.startswith("vllm:")]
        assert scheduler.num_status_calls == 1
        await scheduler.stop()
        async with asyncio.timeout(10):
            await gateway.generation.model_of("").link.wait_until(
                lambda: not gateway.generation.model_of("").link.takes_requests
            )
        seen = await scrape(gateway.http_port)
        assert seen.labels("blockyard_model_requests") == []
        assert seen.sum("blockyard_scheduler_attached") == 0
        await scheduler.start()
    finally:
        await gateway.stop()


async def test_vllms_names_are_told_beside_ours_where_they_are_asked_for(scheduler: FakeScheduler) -> None:
    gateway = Server(configuration(scheduler, vllm_metric_names=True))
    await gateway.start()
    try:
        await attached(gateway)
        gateway.metrics.time_to_first_token.observe(0.5)
        gateway.metrics.sequences.add("stop")
        gateway.metrics.output_tokens.add(count=7)
        seen = await scrape(gateway.http_port)
    finally:
        await gateway.stop()
    assert [metric.name for metric in VLLM if not seen.has(metric)] == []
    assert gateway.metrics.registry.find_missing == []
    whole, replica = {"model_name": "demo", "engine": "0"}, {"model_name": "demo", "engine": "1"}
    assert seen.sum("vllm:num_requests_running", **whole) == 5
    assert seen.sum("vllm:num_requests_waiting", **whole) == 3
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
        assert seen.sum(name, **whole) == (50 + 600) / 800
    assert seen.sum("vllm:prefix_cache_queries_total", **replica) == 100
    assert seen.sum("vllm:prefix_cache_hits_total", **replica) == 40
    assert seen.sum("vllm:num_preemptions_total", **replica) == 2
    assert seen.sum("vllm:generation_tokens_total", **whole) == seen.sum("blockyard_output_tokens_total") == 7
    assert seen.sum("vllm:request_success_total", **whole, finished_reason="stop") == 1
    assert seen.sum("vllm:time_to_first_token_seconds_count", **whole) == 1
    assert seen.sum("vllm:time_to_first_token_seconds_sum", **whole) == 0.5


# What the reference endpoint picker reads of a pod whose label `engine-type` is `vllm`, and which labels it needs: the
# plugin core-metrics-extractor of github.com/llm-d/llm-d-router, May 2026, which came from the inference extension.
PICKED = {
    "vllm:num_requests_waiting": set[str](),
    "vllm:num_requests_running": set[str](),
    "vllm:kv_cache_usage_perc": set[str](),
    "vllm:lora_requests_info": {"max_lora", "running_lora_adapters", "waiting_lora_adapters"},
    "vllm:cache_config_info": {"block_size", "num_gpu_blocks"},
}


async def test_an_endpoint_picker_finds_one_series_of_each_metric(scheduler: FakeScheduler) -> None:
    gateway = Server(configuration(scheduler, vllm_metric_names=True))
    await gateway.start()
    try:
        await attached(gateway)
        before = time.time()
        seen = await scrape(gateway.http_port)
    finally:
        await gateway.stop()
    found = {name: seen.labels(name) for name in PICKED}
    assert {name: len(series) for name, series in found.items()} == dict.fromkeys(PICKED, 1)
    assert {name: labels for name, labels in PICKED.items() if not labels <= found[name][0].keys()} == {}
    cache, loras = found["vllm:cache_config_info"][0], found["vllm:lora_requests_info"][0]
    assert (cache["block_size"], cache["num_gpu_blocks"]) == ("16", "800")
    assert loras == {"max_lora": "8", "running_lora_adapters": "poet,sailor", "waiting_lora_adapters": "sailor"}
    assert before <= seen.sum("vllm:lora_requests_info") <= time.time()
