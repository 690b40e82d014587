"""The load: what is sent when, and the arithmetic of what was seen."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockyard.client.asynchronous import AsyncClient
from blockyard.errors import BlockyardError, Reason
from blockyard.load.edits import draw_edits, read_edits
from blockyard.load.load import (
    MAX_REJECTIONS,
    GrpcApi,
    HttpApi,
    Plan,
    Request,
    Sample,
    Shape,
    distribution,
    draw_requests,
    run_load,
    summarize,
)

if TYPE_CHECKING:
    from tests.kit.fakes.fake_gateway import FakeGateway

SHAPE = Shape((3, 3), (2, 4))


class Clock:
    """An api that takes a while, counts who is inside, and fails as often as told."""

    def __init__(self, num_failures: int = 0, error: BlockyardError | None = None) -> None:
        self.num_inside = self.max_inside = self.num_sent = 0
        self._num_failures = num_failures
        self._error = error or BlockyardError(Reason.DRAINING, "later")

    async def send(self, request: Request, sample: Sample) -> None:
        self.num_sent += 1
        self.num_inside += 1
        self.max_inside = max(self.max_inside, self.num_inside)
        await asyncio.sleep(0.001)
        self.num_inside -= 1
        if self.num_sent <= self._num_failures:
            raise self._error


def test_edits_are_prompts_that_share_nothing_and_whose_answers_are_mostly_there() -> None:
    edits = read_edits()
    requests = list(itertools.islice(draw_edits(SHAPE, 5), 3 * len(edits)))
    assert requests == list(itertools.islice(draw_edits(SHAPE, 5), 3 * len(edits)))
    assert len({request.text[:10] for request in requests}) == len(requests)
    assert all(2 <= request.num_output_tokens <= 4 for request in requests)
    # Each edit comes once in a round.
    first = {request.text.partition(": ")[2] for request in requests[: len(edits)]}
    assert first == {edit.make_prompt(0).partition(": ")[2] for edit in edits}
    lines = [(edit.before.splitlines(), edit.after.splitlines()) for edit in edits]
    assert all(0.5 < SequenceMatcher(None, *each).ratio() < 1 for each in lines)


async def test_a_closed_loop_has_so_many_clients() -> None:
    api = Clock()
    samples = await run_load(api, draw_requests(SHAPE, 0), Plan(concurrency=3, num_requests=20))
    assert (len(samples), api.max_inside) == (20, 3)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    api = Clock()
    done: list[Sample] = []
    samples = await run_load(api, draw_requests(SHAPE, 0), Plan(rate=2000, num_requests=20), done.append)
    assert samples == done
    assert api.num_sent == 20
    gaps = [later - earlier for earlier, later in itertools.pairwise(sorted(sample.arrival for sample in samples))]
    assert statistics.stdev(gaps) > 0


async def test_a_load_ends_by_time_and_waits_for_its_answers() -> None:
    api = Clock()
    for plan in (Plan(concurrency=2, duration_seconds=0.05), Plan(rate=500, duration_seconds=0.05)):
        samples = await run_load(api, draw_requests(SHAPE, 0), plan)
        assert samples
        assert all(sample.end for sample in samples)


async def test_errors_are_counted_by_reason() -> None:
    samples = await run_load(Clock(num_failures=2), draw_requests(SHAPE, 0), Plan(num_requests=5))
    summary = summarize(samples)
    assert (summary.num_requests, summary.num_errors, summary.errors) == (3, 2, {"DRAINING": 2})


@pytest.mark.parametrize("reason", [Reason.QUEUE_FULL, Reason.TOKEN_BACKLOG, Reason.TENANT_QUOTA])
async def test_who_is_told_to_come_back_later_does(reason: Reason) -> None:
    api = Clock(4, BlockyardError(reason, "full", retry_after_seconds=0.001))
    samples = await run_load(api, draw_requests(SHAPE, 0), Plan(concurrency=2, num_requests=3))
    summary = summarize(samples)
    assert (summary.num_requests, summary.num_errors, summary.num_rejections) == (3, 0, 4)
    assert api.num_sent == 7
    assert max(sample.num_rejections for sample in samples) >= 2


@pytest.mark.parametrize(
    ("error", "num_sent"),
    [
        (BlockyardError(Reason.QUEUE_FULL, "full, and no word of when it is not"), 1),
        (BlockyardError(Reason.NEVER_FITS, "never", retry_after_seconds=0.0), 1),
        (BlockyardError(Reason.QUEUE_FULL, "for ever", retry_after_seconds=0.0), 1 + MAX_REJECTIONS),
    ],
)
async def test_a_rejection_that_fails(error: BlockyardError, num_sent: int) -> None:
    api = Clock(1000, error)
    summary = summarize(await run_load(api, draw_requests(SHAPE, 0), Plan(num_requests=1)))
    assert (summary.num_errors, summary.errors, api.num_sent) == (1, {str(error.reason): 1}, num_sent)


async def test_a_bug_of_ours_ends_the_load() -> None:
    class Broken:
        async def send(self, request: Request, sample: Sample) -> None:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        await run_load(Broken(), draw_requests(SHAPE, 0), Plan(concurrency=2, num_requests=5))


def test_requests_are_drawn_by_their_seed() -> None:
    first, again, other = (list(itertools.islice(draw_requests(SHAPE, seed), 50)) for seed in (1, 1, 2))
    assert first == again != other
    assert {request.num_output_tokens for request in first} == {2, 3, 4}
    assert {request.num_prompt_tokens for request in first} == {3}


async def test_grpc(async_gateway: FakeGateway) -> None:
    async with AsyncClient(async_gateway.target) as client:
        sample = Sample(arrival=1.0)
        await GrpcApi(client, "fake", 10).send(Request(1, 5, 4, 0.0, True), sample)
    (spec,) = async_gateway.specs
    assert len(spec.token_ids.ids) == 5
    assert all(token_id < 10 for token_id in spec.token_ids.ids)
    assert (spec.model, spec.stop.max_tokens, spec.stop.ignore_eos, spec.sampling.temperature) == ("fake", 4, True, 0.0)
    assert (sample.num_prompt_tokens, sample.num_output_tokens, len(sample.gaps_seconds)) == (5, 4, 3)
    assert 1.0 < sample.first_token <= sample.last_token


async def test_http(async_gateway: FakeGateway) -> None:
    sample = Sample(arrival=1.0)
    await HttpApi(async_gateway.url, "fake", {"x-blockyard-tenant": "team-1"}).send(Request(1, 5, 4, 0.0, True), sample)
    assert "\r\nx-blockyard-tenant: team-1\r\n" in async_gateway.http_heads[0]
    (body,) = async_gateway.http_bodies
    assert len(body["prompt"].split()) == 5
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert (sample.num_prompt_tokens, sample.num_output_tokens, len(sample.gaps_seconds)) == (5, 4, 3)


def test_a_summary() -> None:
    samples = [
        Sample(10.0, 11.0, 13.0, 13.5, num_prompt_tokens=5, num_output_tokens=3, gaps_seconds=[1.0, 1.0]),
        Sample(10.5, 12.5, 12.5, 14.0, num_prompt_tokens=5, num_output_tokens=1),
        Sample(9.0, end=9.5, num_prompt_tokens=100, error="BUG"),
    ]
    summary = summarize(samples)
    assert summary.elapsed_seconds == 5.0
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (10, 4)
    assert (summary.requests_per_second, summary.output_tokens_per_second) == (0.4, 0.8)
    assert summary.total_tokens_per_second == pytest.approx(2.8)
    assert summary.time_to_first_token is not None
    assert summary.time_to_first_token.mean == 1.5
    assert summary.inter_token_latency is not None
    assert summary.inter_token_latency.percentiles == {50: 1.0, 90: 1.0, 99: 1.0}
    assert summary.time_per_output_token is not None
    assert summary.time_per_output_token.mean == 1.0
    assert summary.end_to_end is not None
    assert summary.end_to_end.mean == 3.5


def test_a_summary_of_nothing() -> None:
    summary = summarize([])
    assert (summary.num_requests, summary.requests_per_second, summary.end_to_end) == (0, 0.0, None)


@given(st.lists(st.floats(0, 1000), min_size=2, max_size=200))
def test_percentiles_are_those_of_the_textbook(values: list[float]) -> None:
    seen = distribution(values)
    assert seen is not None
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [seen.percentiles[percent] for percent in (50, 90, 99)] == pytest.approx([cuts[49], cuts[89], cuts[98]])
    assert seen.mean == pytest.approx(statistics.fmean(values))


def test_one_value_is_every_percentile() -> None:
    seen = distribution([2.0])
    assert seen is not None
    assert set(seen.percentiles.values()) == {2.0}
