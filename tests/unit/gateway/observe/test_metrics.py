"""What the gateway measures of requests: each token once, whoever reads it, and times only where they are known."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from blockyard.contract.events import Delta
from blockyard.contract.request import Position
from blockyard.contract.sampling import FinishReason, StopCriteria
from blockyard.contract.scheduling import Acceptance, Failure, Prefill
from blockyard.errors import BlockyardError, Reason
from blockyard.service.metrics import TASKS
from gateway.observe.metrics import (
    MODEL_HIT_TOKENS,
    MODEL_KV_USAGE,
    MODEL_QUERY_TOKENS,
    MODEL_REQUESTS,
    GatewayMetrics,
    RequestMeter,
)
from tests.kit.processes.scrape import Scrape
from tests.unit.gateway.core import Core, watch
from tests.unit.gateway.harness import ids_of

if TYPE_CHECKING:
    from gateway.live.reader import Reader

LENGTH = FinishReason.LENGTH


def scrape(core: Core) -> Scrape:
    return Scrape.of(core.live.metrics.registry)


def num_tokens(core: Core) -> float:
    return scrape(core).sum("blockyard_output_tokens_total")


async def read_on(reader: Reader) -> int:
    """Reads a delta and tells how many tokens it came to."""
    event = await anext(reader)
    assert isinstance(event, Delta)
    return event.num_tokens


async def rest_of(reader: Reader) -> None:
    async for _ in reader:
        pass


async def test_a_whole_answer_is_measured_from_its_arrival_to_its_end() -> None:
    core = Core()
    reader = await core.accepted(prompt=(5, 6, 7))
    core.told(prefilled=[Prefill(core.first, 2)])
    core.tokens(core.first, *ids_of("once upon"))
    told = await read_on(reader)
    core.tokens(core.first, *ids_of(" a time"), end=LENGTH)
    await rest_of(reader)
    expected = len(ids_of("once upon")) + len(ids_of(" a time"))
    seen = scrape(core)
    assert seen.sum("blockyard_requests_total") == 1
    assert seen.sum("blockyard_finished_requests_total", result="whole") == 1
    assert seen.sum("blockyard_finished_sequences_total", reason="length") == 1
    assert seen.sum("blockyard_output_tokens_total") == expected
    assert seen.sum("blockyard_request_output_tokens_sum") == expected
    assert seen.sum("blockyard_request_prompt_tokens_sum") == 3
    # What came with the first message has no time before it.
    assert seen.sum("blockyard_inter_token_latency_seconds_count") == expected - told
    for name in ("time_to_first_token", "request_latency", "time_per_output_token"):
        assert seen.sum(f"blockyard_{name}_seconds_count") == 1
    first, whole = (seen.sum(f"blockyard_{name}_seconds_sum") for name in ("time_to_first_token", "request_latency"))
    assert 0 < first < whole


async def test_an_answer_that_is_not_streamed_has_no_time_between_tokens() -> None:
    core = Core()
    reader = await core.accepted()
    reader.be_patient()
    core.told(prefilled=[Prefill(core.first, 0)])
    for token_id in ids_of("once upon a time"):
        core.tokens(core.first, token_id)
    core.tokens(core.first, *ids_of("!"), end=LENGTH)
    await rest_of(reader)
    seen = scrape(core)
    assert seen.sum("blockyard_output_tokens_total") == len(ids_of("once upon a time")) + 1
    assert seen.sum("blockyard_inter_token_latency_seconds_count") == 0
    assert seen.sum("blockyard_time_to_first_token_seconds_count") == 1
    assert seen.sum("blockyard_time_per_output_token_seconds_count") == 1


async def test_an_end_token_without_a_text_counts_as_the_answer_counts_it() -> None:
    core = Core()
    reader = await core.accepted()
    token_ids = ids_of("once")
    core.tokens(core.first, *token_ids, 0, end=FinishReason.STOP)
    events = [event async for event in reader]
    assert num_tokens(core) == events[-1].usage.num_completion_tokens == len(token_ids) + 1  # type: ignore[union-attr]


async def test_what_lies_behind_a_stop_string_is_not_told_and_not_counted() -> None:
    core = Core()
    reader = await core.accepted(stop=StopCriteria(stop_strings=("time",)))
    core.tokens(core.first, *ids_of("once upon a time there was nobody"))
    events = [event async for event in reader]
    assert num_tokens(core) == events[-1].usage.num_completion_tokens < len(ids_of("once upon a time there was nobody"))  # type: ignore[union-attr]
    assert scrape(core).sum("blockyard_finished_sequences_total", reason="stop") == 1


async def test_tokens_that_are_read_twice_count_once() -> None:
    core = Core()
    first = await core.accepted()
    core.tokens(core.first, *ids_of("once upon"))
    await read_on(first)
    before = num_tokens(core)
    second = await core.start()
    await anext(second)
    await read_on(second)
    assert num_tokens(core) == before > 0
    core.tokens(core.first, *ids_of(" a time"), end=LENGTH)
    await rest_of(second)
    await rest_of(first)
    third = await core.start()
    await rest_of(third)
    assert num_tokens(core) == before + len(ids_of(" a time"))
    assert scrape(core).sum("blockyard_requests_total") == 1
    assert scrape(core).sum("blockyard_finished_requests_total") == 1


async def test_what_another_gateway_told_is_not_counted_here_and_its_times_are_not_known() -> None:
    core = Core()
    submission = await core.submission_of("r")
    positions = {0: Position(num_tokens=2, num_text_bytes=len("once"))}
    asking = asyncio.create_task(core.resume("r", positions=positions))
    await asyncio.sleep(0)
    told = ids_of("once upon a time")
    core.told(resumed=[core.resumed(core.link.resumes[-1].handle, submission, tuple(told))])
    reader = await asking
    await anext(reader)
    await read_on(reader)
    assert num_tokens(core) == len(told) - 2
    core.tokens(50, *ids_of("!"), end=LENGTH)
    await rest_of(reader)
    seen = scrape(core)
    assert seen.sum("blockyard_output_tokens_total") == len(told) - 2 + 1
    assert seen.sum("blockyard_requests_total") == 0
    assert seen.sum("blockyard_finished_requests_total", result="whole") == 1
    for name in ("time_to_first_token", "request_latency", "time_per_output_token"):
        assert seen.sum(f"blockyard_{name}_seconds_count") == 0


async def test_a_lost_scheduler_costs_no_token_and_is_counted() -> None:
    core = Core()
    reader = await core.accepted()
    core.told(prefilled=[Prefill(core.first, 0)])
    core.tokens(core.first, *ids_of("once upon"))
    before = await read_on(reader)
    core.lost()
    core.attached()
    again = core.link.adds[-1]
    assert again.resubmission is not None
    core.told(accepted=[Acceptance(again.handle, 70)])
    core.told(prefilled=[Prefill(70, 0)])
    core.tokens(70, *ids_of(" a time"), end=LENGTH)
    await rest_of(reader)
    seen = scrape(core)
    assert seen.sum("blockyard_output_tokens_total") == before + len(ids_of(" a time"))
    assert seen.sum("blockyard_scheduler_losses_total") == 1
    assert seen.sum("blockyard_requests_total") == seen.sum("blockyard_time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("reason", [Reason.CLIENT_CANCELLED, Reason.QUEUE_FULL, Reason.POISON_REQUEST])
async def test_a_request_that_fails_is_counted_by_its_reason(reason: Reason) -> None:
    core = Core()
    reader = await core.accepted()
    if reason is Reason.CLIENT_CANCELLED:
        core.live.cancel(["r"])
    else:
        core.told(failed=[Failure(core.link.adds[-1].handle, BlockyardError(reason, "no"))])
    with pytest.raises(BlockyardError):
        await rest_of(reader)
    seen = scrape(core)
    assert seen.sum("blockyard_finished_requests_total", result=str(reason)) == 1
    assert seen.sum("blockyard_finished_requests_total") == 1
    assert seen.sum("blockyard_request_latency_seconds_count") == 0


async def test_live_requests_and_streams_are_what_they_are() -> None:
    core = Core()
    metrics = core.live.metrics
    watch(metrics, core.service, core.live, core.link)
    # The heartbeat of a process counts its tasks, and its link asks the scheduler.
    of_scheduler = [MODEL_REQUESTS, MODEL_KV_USAGE, MODEL_QUERY_TOKENS, MODEL_HIT_TOKENS]
    assert metrics.registry.find_missing == [each.name for each in (TASKS, *of_scheduler)]
    readers = [await core.accepted(f"r{number}", 10 * number) for number in range(1, 4)]
    core.live.on_reader_closed(await core.start("r1"))
    seen = scrape(core)
    assert seen.sum("blockyard_live_requests") == seen.sum("blockyard_live_streams") == 3
    assert seen.sum("blockyard_scheduler_attached") == seen.sum("blockyard_ready") == 1
    assert seen.labels("blockyard_model_info") == [{"model": "demo", "determinism_id": "id"}]
    for reader in readers:
        reader.close()
    core.link.takes_requests = False
    seen = scrape(core)
    assert seen.sum("blockyard_live_requests") == seen.sum("blockyard_live_streams") == 0
    assert seen.sum("blockyard_scheduler_attached") == 0


def test_tokens_told_at_once_share_the_time_before_them() -> None:
    now = 100.0
    metrics = GatewayMetrics(lambda: now)
    meter = RequestMeter(metrics, 90.0)
    meter.on_first_token()
    meter.on_tokens_read(0, 1)
    now = 100.5
    meter.on_tokens_read(0, 6)
    meter.on_tokens_read(0, 6)
    meter.on_tokens_read(0, 4)
    now = 101.0
    meter.on_tokens_read(1, 3)
    now = 101.25
    meter.on_tokens_read(1, 4)
    assert metrics.time_to_first_token.sum == 10.0
    assert metrics.inter_token_latency.count == 6
    assert metrics.inter_token_latency.sum == pytest.approx(0.5 + 0.25)
    buckets = {bucket[0]: bucket[1] for bucket in metrics.inter_token_latency.buckets()}
    assert buckets["0.1"] - buckets["0.075"] == 5
    assert dict(metrics.output_tokens.samples()) == {(): 6 + 4}


def test_the_time_in_which_nobody_reads_is_no_latency() -> None:
    now = 100.0
    metrics = GatewayMetrics(lambda: now)
    meter = RequestMeter(metrics, 90.0)
    meter.on_tokens_read(0, 5)
    now = 160.0
    meter.on_read_from({0: Position(num_tokens=4)})
    meter.on_tokens_read(0, 25)
    assert metrics.inter_token_latency.count == 0
    now = 160.5
    meter.on_tokens_read(0, 26)
    assert metrics.inter_token_latency.sum == 0.5
    assert dict(metrics.output_tokens.samples()) == {(): 26}
