"""What the scheduler tells Prometheus of steps, queues, blocks, cancels and recoveries, against what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from blockyard.service.metrics import Registry
from scheduler_service.catalogue import CATALOGUE
from scheduler_service.core.values import StepResult
from scheduler_service.replicas.steps.step_metrics import StepMeter, StepMetrics
from scheduler_service.replicas.steps.steps_in_flight import AnsweredStep
from tests.kit.oracles.token_oracle import oracle, until_idle
from tests.kit.processes.scrape import Scrape
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.config import SchedulerConfiguration
    from scheduler_service.server import Server
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]


def scrape(server: Server) -> Scrape:
    return Scrape.of(server.service.metrics.registry)


async def test_a_scheduler_without_workers_tells_all_it_has(harness: Harness, settings: Settings) -> None:
    server = await harness.scheduler(settings(scheduler_metrics_port=0))
    client = await harness.client(ready=False)
    await client.wait_until(lambda: client.readiness is not None)
    seen = Scrape.get(f"127.0.0.1:{server.monitoring.metrics_port}")
    assert [metric.name for metric in CATALOGUE if not seen.has(metric)] == []
    assert server.service.metrics.registry.find_missing == []
    assert seen.sum("blockyard_ready") == seen.sum("blockyard_ready_replicas") == 0
    assert seen.sum("blockyard_workers", state="UNREACHABLE") == seen.sum("blockyard_workers") == 1
    assert seen.sum("blockyard_attached_gateways") == 1


async def test_tokens_steps_and_the_cache_are_what_the_clients_saw(harness: Harness) -> None:
    await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    prompt = list(range(40))
    for number, n in enumerate((1, 2)):
        await client.result(await client.add(f"r{number}", prompt, n=n, max_tokens=10))
    await until_idle(server)
    seen, stats = scrape(server), server.service.stats()[0]
    assert seen.sum("blockyard_generated_tokens_total", replica="0") == 30
    assert seen.sum("blockyard_prompt_tokens_total") == seen.sum("blockyard_prefix_cache_query_tokens_total") == 80
    # Of the second prompt the full blocks were found.
    assert seen.sum("blockyard_prefix_cache_hit_tokens_total") == 32
    assert seen.sum("blockyard_cached_blocks", pool="device") == stats.num_cached_device_blocks > 0
    assert seen.sum("blockyard_blocks", pool="device", state="free") == stats.num_device_blocks
    assert seen.sum("blockyard_blocks", state="used") == 0
    assert seen.sum("blockyard_workers", state="RUNNING") == 1
    num_steps = server.service.engines[0].step_loop.step_log.num_steps
    assert seen.sum("blockyard_steps_total") == num_steps
    for phase in ("schedule", "encode", "wait", "execute", "update"):
        assert seen.sum("blockyard_step_seconds_count", phase=phase) == num_steps
    assert seen.sum("blockyard_step_sequences_count") == seen.sum("blockyard_step_tokens_count") == num_steps
    # What was not found was computed once, and each sampled token but the last of a sequence.
    assert seen.sum("blockyard_step_tokens_sum") >= 80 - 32 + 30 - 3
    assert seen.sum("blockyard_queue_seconds_count") == 2
    calls = {"method": "blockyard.scheduler.v1.SchedulerService/GetSchedulerStatus", "code": "OK"}
    before = seen.sum("blockyard_grpc_calls_total", **calls)
    await client.status()
    assert scrape(server).sum("blockyard_grpc_calls_total", **calls) == before + 1


async def test_prompts_that_are_not_looked_up_are_no_queries(harness: Harness, settings: Settings) -> None:
    await harness.worker()
    server = await harness.scheduler(settings(enable_prefix_caching=False))
    client = await harness.client()
    await client.result(await client.add("r", list(range(40))))
    seen = scrape(server)
    assert seen.sum("blockyard_prompt_tokens_total") == 40
    assert seen.sum("blockyard_prefix_cache_query_tokens_total") == seen.sum("blockyard_cached_blocks") == 0


async def test_what_waits_is_counted_in_requests_and_tokens(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker(step_seconds=0.01)
    server, client = await harness.scheduler(settings(max_num_seqs=2)), await harness.client()
    streams = [await client.add(f"r{number}", [number + 1] * (10 + number), max_tokens=50) for number in range(2)]
    # A request counts as running from when a replica has it, a sequence from when a step holds it.
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    worker.hang()
    for number in range(2, 5):
        await client.add(f"r{number}", [number + 1] * (10 + number))
    await until(lambda: scrape(server).sum("blockyard_requests", state="waiting") == 3)
    await until(lambda: scrape(server).sum("blockyard_steps_in_flight", replica="0") >= 1)
    seen = scrape(server)
    assert seen.sum("blockyard_sequences", state="running") == 2
    assert seen.sum("blockyard_requests", state="running") == 2
    assert seen.sum("blockyard_waiting_tokens") == 12 + 13 + 14
    assert seen.sum("blockyard_blocks", pool="device", state="used") >= 2
    worker.go_on()
    await until_idle(server)
    seen = scrape(server)
    assert seen.sum("blockyard_requests") == seen.sum("blockyard_waiting_tokens") == 0
    assert seen.sum("blockyard_queue_seconds_count") == 5


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_preemptions_are_told_by_their_mode(harness: Harness, settings: Settings, mode: str) -> None:
    await harness.worker(num_device_blocks=13, num_host_blocks=20)
    server = await harness.scheduler(settings(preemption_mode=mode, num_device_blocks=13, num_host_blocks=20))
    client = await harness.client()
    streams = [await client.add(f"r{number}", [number + 1] * 30, max_tokens=60) for number in range(4)]
    for stream in streams:
        await client.result(stream)
    await until_idle(server)
    seen, stats = scrape(server), server.service.stats()[0]
    assert seen.sum("blockyard_preemptions_total") == stats.num_preemptions_total > 0
    assert seen.sum("blockyard_preemptions_total", mode=mode) > 0
    assert seen.sum("blockyard_moved_blocks_total", direction="out") == stats.num_swapped_out_blocks_total
    assert seen.sum("blockyard_cached_blocks", pool="host") == stats.num_cached_host_blocks
    if mode == "swap":
        assert seen.sum("blockyard_moved_blocks_total", direction="in") > 0
        assert stats.num_cached_host_blocks > 0
    else:
        assert seen.sum("blockyard_preemptions_total", mode="swap") == 0
    assert seen.sum("blockyard_generated_tokens_total") == 240


async def test_who_is_sent_away_and_who_fails_is_told_by_reason(harness: Harness, settings: Settings) -> None:
    worker = await harness.worker()
    server = await harness.scheduler(settings(max_num_seqs=1, max_waiting_requests=2))
    client = await harness.client()
    assert scrape(server).sum("blockyard_refused_requests_total", reason="QUEUE_FULL") == 0
    worker.hang()
    streams = [await client.add(f"r{number}", [number + 1] * 10) for number in range(5)]
    await client.wait_until(lambda: sum(stream.error is not None for stream in streams) == 2)
    await client.cancel("r1")
    too_long = await client.add("long", [1] * 5000)
    await client.wait_until(lambda: too_long.error is not None)
    worker.go_on()
    await until_idle(server)
    seen = scrape(server)
    assert seen.sum("blockyard_refused_requests_total", reason="QUEUE_FULL") == 2
    assert too_long.error is not None
    assert seen.sum("blockyard_refused_requests_total", reason=str(too_long.error.reason)) == 1
    assert seen.sum("blockyard_failed_requests_total", reason="CLIENT_CANCELLED") == 1
    assert seen.sum("blockyard_refused_requests_total") == 3


async def test_a_cancel_is_over_when_the_steps_before_it_are(harness: Harness) -> None:
    worker = await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    # Before there is a step: the answer to one that runs would still come.
    await until(lambda: worker.devices)
    worker.hang()
    await client.add("r", [1] * 10, max_tokens=1000)
    await until(lambda: server.service.stats()[0].num_steps_in_flight > 0)
    await client.abort("r")
    await until(lambda: not server.service.requests.live)
    assert scrape(server).sum("blockyard_cancel_to_free_seconds_count") == 0
    worker.go_on()
    await until_idle(server)
    seen = scrape(server)
    assert seen.sum("blockyard_cancel_to_free_seconds_count") == 1
    assert seen.sum("blockyard_cancel_to_free_seconds_sum") > 0
    # An end that nobody asked for is none.
    await client.result(await client.add("whole", [1] * 10))
    assert scrape(server).sum("blockyard_cancel_to_free_seconds_count") == 1


async def test_a_killed_worker_costs_computing_and_no_token(harness: Harness, settings: Settings) -> None:
    workers = [await harness.worker(name, step_seconds=0.002) for name in ("", "-2")]
    address = harness.configuration.service.worker_address
    server = await harness.scheduler(settings(worker_address=f"{address},{address}-2"))
    client = await harness.client()
    await until(lambda: scrape(server).sum("blockyard_ready_replicas") == 2)
    streams = [await client.add(f"r{number}", [number + 1] * 20, max_tokens=200) for number in range(4)]
    await client.wait_until(lambda: all(stream.token_ids[0] for stream in streams))
    await workers[0].kill()
    for stream in streams:
        assert len((await client.result(stream))[0]) == 200
    await until_idle(server)
    recovered = [each for stream in streams for each in stream.recovered]
    seen = scrape(server)
    assert seen.sum("blockyard_worker_losses_total", cause="died") == 1
    assert seen.sum("blockyard_recovered_requests_total", lost="worker") == len(recovered) > 0
    assert seen.sum("blockyard_recomputed_tokens_total") == sum(each.num_replayed_tokens for each in recovered)
    assert seen.sum("blockyard_inexact_recoveries_total") == 0
    assert seen.sum("blockyard_generated_tokens_total") == 4 * 200
    assert seen.sum("blockyard_prompt_tokens_total") == 4 * 20
    assert seen.sum("blockyard_queue_seconds_count") == 4
    assert {labels["replica"] for labels in seen.labels("blockyard_generated_tokens_total")} == {"0", "1"}


@pytest.mark.parametrize("speculation", ["ngram", "auto"])
async def test_drafts_are_counted_and_change_no_token(harness: Harness, settings: Settings, speculation: str) -> None:
    await harness.worker()
    server = await harness.scheduler(settings(speculation=speculation, max_draft_tokens=5))
    client = await harness.client()
    prompts = [[number + 1] * 20 for number in range(4)]
    streams = [await client.add(f"r{number}", prompt, max_tokens=60) for number, prompt in enumerate(prompts)]
    assert [await client.result(stream) for stream in streams] == [oracle(prompt, 60) for prompt in prompts]
    await until_idle(server)
    seen = scrape(server)
    drafted, right = (seen.sum(f"blockyard_{name}_tokens_total", replica="0") for name in ("draft", "accepted"))
    assert drafted > right > 60
    # This worker has neither grammars nor predictions.
    assert seen.sum("blockyard_draft_tokens_total", replica="0", source="suffix") == drafted
    assert seen.sum("blockyard_generated_tokens_total") == 4 * 60
    assert seen.sum("blockyard_steps_total") < 60 + 10


async def test_a_drained_worker_has_not_died(harness: Harness) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1] * 20, max_tokens=100)
    await client.wait_until(lambda: stream.token_ids[0])
    worker.drain()
    await until(lambda: scrape(server).sum("blockyard_worker_losses_total") == 1)
    assert scrape(server).sum("blockyard_worker_losses_total", cause="drained") == 1
    assert scrape(server).sum("blockyard_ready") == 0
    await client.cancel("r")


async def test_a_scheduler_that_takes_over_tells_what_it_computes_again(harness: Harness) -> None:
    await harness.worker(step_seconds=0.002)
    async with harness.running_scheduler():
        client = await harness.client()
        stream = await client.add("r", [1] * 20, max_tokens=100)
        fresh = await client.add("fresh", [2] * 20, max_tokens=100)
        await client.wait_until(lambda: len(stream.token_ids[0]) > 5)
    fresh.token_ids = [[]]
    server, successor = await harness.scheduler(), await harness.client("successor")
    taken_over = await successor.resubmit(stream)
    num_known = 20 + len(stream.token_ids[0])
    waited = await successor.resubmit(fresh)
    assert len((await successor.result(taken_over))[0]) == len((await successor.result(waited))[0]) == 100
    seen = scrape(server)
    assert seen.sum("blockyard_recovered_requests_total", lost="scheduler") == 1
    assert seen.sum("blockyard_recomputed_tokens_total", lost="scheduler") == num_known
    assert seen.sum("blockyard_recovered_requests_total", lost="worker") == 0
    # What goes on has waited before; what had no token has its turn now.
    assert seen.sum("blockyard_queue_seconds_count") == 1


class Clock:
    """A meter whose steps are answered when the test says so."""

    def __init__(self) -> None:
        self.metrics = StepMetrics(Registry("test", ()))
        self.meter = StepMeter(self.metrics)

    def answer(self, step_id: int, at: float) -> None:
        result = StepResult(step_id, forward_seconds=0.003, cache_seconds=0.001)
        self.meter.on_answered(result, 0.0001, AnsweredStep(3, 50, at, 0.005))

    @property
    def cancels(self) -> tuple[int, float]:
        return self.metrics.cancel.count, pytest.approx(self.metrics.cancel.sum)  # type: ignore[return-value]


def test_the_phases_of_a_step_are_what_was_told() -> None:
    clock = Clock()
    clock.meter.on_scheduled(1, 0.0002)
    clock.meter.on_sent(0.00005)
    clock.answer(1, 10.0)
    metrics = clock.metrics
    sums = (metrics.schedule.sum, metrics.encode.sum, metrics.wait.sum, metrics.execute.sum, metrics.update.sum)
    assert sums == pytest.approx((0.0002, 0.00005, 0.005, 0.004, 0.0001))
    assert (metrics.num_sequences.sum, metrics.num_tokens.sum) == (3, 50)


def test_a_cancel_waits_for_the_steps_that_were_on_their_way() -> None:
    clock = Clock()
    clock.meter.on_scheduled(1, 0.0)
    clock.meter.on_scheduled(2, 0.0)
    clock.meter.on_cancelled(10.0)
    clock.meter.on_scheduled(3, 0.0)
    clock.meter.on_cancelled(11.0)
    clock.answer(1, 12.0)
    assert clock.cancels == (0, 0.0)
    clock.answer(2, 13.0)
    assert clock.cancels == (1, 3.0)
    clock.answer(3, 14.0)
    assert clock.cancels == (2, 3.0 + 3.0)
    clock.meter.on_cancelled(15.0)
    assert clock.cancels == (3, 6.0)


def test_with_the_worker_all_steps_are_gone_and_count_from_one_again() -> None:
    clock = Clock()
    for step_id in range(1, 6):
        clock.meter.on_scheduled(step_id, 0.0)
    clock.answer(1, 1.0)
    clock.meter.on_cancelled(2.0)
    clock.meter.on_lost(2.5)
    assert clock.cancels == (1, 0.5)
    clock.meter.on_scheduled(1, 0.0)
    clock.meter.on_cancelled(3.0)
    clock.answer(1, 4.0)
    assert clock.cancels == (2, 1.5)
