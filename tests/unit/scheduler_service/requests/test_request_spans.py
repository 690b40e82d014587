"""How far requests are, as those who trace see it: over real sockets, with a fake worker."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.trace import encode_trace_context
from blockyard.errors import BlockyardError
from blockyard.tracing.spans import use_tracer
from scheduler_service.core.values import GroupSpec, NewSequence, SchedulerOutput
from scheduler_service.replicas.codec import encode_step
from tests.kit.oracles.token_oracle import oracle, until_idle
from tests.kit.processes.spans import CALLER, Recorder, Seen, recorded_spans
from tests.kit.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blockyard.contract.trace import TraceContext
    from scheduler_service.config import SchedulerConfiguration
    from tests.kit.fakes.token_client import Stream, TokenClient
    from tests.unit.scheduler_service.conftest import Harness

    Settings = Callable[..., SchedulerConfiguration]

TRACED: dict[str, Any] = {"trace_context": encode_trace_context(CALLER)}


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with recorded_spans() as recorder:
        yield recorder
        recorder.check_all_ended()


async def finished(client: TokenClient, stream: Stream, prompt: list[int], max_tokens: int) -> None:
    assert await client.result(stream) == oracle(prompt, max_tokens, n=stream.n)


def requests_of(recorder: Recorder) -> Seen:
    """The spans of requests: a worker's start is a trace of its own."""
    starts = {span.trace_id for span in recorder.seen.named("start-up")}
    return Seen(span for span in recorder.seen.spans if span.trace_id not in starts)


def names(seen: Seen) -> list[str]:
    return [span.name for span in seen.spans]


async def test_a_request_waits_is_prefilled_and_decodes(harness: Harness, recorder: Recorder) -> None:
    worker = await harness.worker()
    server, client = await harness.scheduler(), await harness.client()
    await finished(client, await client.add("r", [5, 6, 7], max_tokens=9, **TRACED), [5, 6, 7], 9)
    await until_idle(server)
    seen = requests_of(recorder)
    assert names(seen) == ["queue", "prefill", "decode"]
    assert {(span.trace_id, span.parent_id) for span in seen.spans} == {(CALLER.trace_id, CALLER.traceparent[36:52])}
    assert all(span.attributes["request_id"] == "r" and not span.error for span in seen.spans)
    queue, prefill, decode = seen.spans
    assert queue.end_seconds <= prefill.start_seconds <= prefill.end_seconds <= decode.start_seconds
    told = {"replica_id": 0, "num_prompt_tokens": 3, "num_cached_tokens": 0}
    assert told.items() <= prefill.attributes.items()
    assert {"finish_reasons": ("length",), "num_completion_tokens": 9}.items() <= decode.attributes.items()
    assert worker.refusals == []


def test_a_worker_is_told_of_traced_sequences_alone() -> None:
    def new(sequence_id: int, context: TraceContext | None) -> NewSequence:
        spec = GroupSpec("r", "gateway", (5, 6), 1, 8, 0, frozenset(), trace_context=context)
        return NewSequence(sequence_id, 0, (5, 6), 2, 0, (1,), spec)

    traced, other = encode_step(SchedulerOutput(1, (new(1, CALLER), new(2, None))), epoch=1).new_sequences
    assert traced.trace_context == TRACED["trace_context"]
    assert not other.HasField("trace_context")


async def test_nobody_is_watched_who_is_not_traced(harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await harness.worker(step_seconds=0.002)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [1], max_tokens=50, **TRACED)
    await client.wait_until(lambda: stream.token_ids[0])
    assert server.service.requests.spans._watched == {}
    await client.result(stream)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
async def test_a_preemption_is_a_span_of_its_own(
    harness: Harness, settings: Settings, recorder: Recorder, mode: str
) -> None:
    await harness.worker()
    server = await harness.scheduler(settings(num_device_blocks=12, block_size=8, preemption_mode=mode))
    client = await harness.client()
    prompts = [[number + 1] * 10 for number in range(6)]
    streams = [await client.add(f"r{number}", prompt, max_tokens=30, **TRACED) for number, prompt in enumerate(prompts)]
    for stream, prompt in zip(streams, prompts, strict=True):
        await finished(client, stream, prompt, 30)
    await until_idle(server)
    num_preemptions = (await client.status()).num_preemptions
    preempted = requests_of(recorder).named("preempted")
    assert 0 < len(preempted) <= num_preemptions
    assert mode in {span.attributes["mode"] for span in preempted}
    for span in preempted:
        [decode] = [
            each
            for each in requests_of(recorder).named("decode")
            if each.attributes["request_id"] == span.attributes["request_id"]
        ]
        assert span.attributes["sequence_index"] == 0
        assert span.end_seconds <= decode.end_seconds
    # One life each, however often it gave way.
    assert len(requests_of(recorder).named("queue")) == len(requests_of(recorder).named("decode")) == 6


async def test_a_lost_worker_is_a_recovery_in_the_same_trace(harness: Harness, recorder: Recorder) -> None:
    worker = await harness.worker(step_seconds=0.002)
    server, client = await harness.scheduler(), await harness.client()
    stream = await client.add("r", [5, 6, 7], n=2, max_tokens=60, **TRACED)
    await client.wait_until(lambda: len(stream.token_ids[1]) > 5)
    await worker.kill()
    await client.wait_until(lambda: not client.readiness or not client.readiness.ready)
    await harness.worker()
    await finished(client, stream, [5, 6, 7], 60)
    await until_idle(server)
    seen = requests_of(recorder)
    assert seen.trace_ids == {CALLER.trace_id}
    assert names(seen)[:3] == ["queue", "prefill", "decode"]
    assert sorted(names(seen)[3:]) == ["decode", "prefill", "queue", "recovery"]
    lost, again = seen.named("decode")
    recovery = seen.one("recovery")
    assert (lost.error, again.error) == ("the worker was lost", "")
    assert recovery.attributes["cause"] == "the worker was lost"
    assert recovery.attributes["num_replayed_tokens"] >= 3 + 6
    assert lost.end_seconds <= recovery.start_seconds <= recovery.end_seconds <= again.start_seconds


async def test_a_request_that_ends_while_it_waits_has_waited(
    harness: Harness, settings: Settings, recorder: Recorder
) -> None:
    await harness.worker(step_seconds=0.01)
    server, client = await harness.scheduler(settings(max_num_seqs=1)), await harness.client()
    running = await client.add("running", [1], max_tokens=500)
    await client.wait_until(lambda: running.token_ids[0])
    await client.add("waiting", [2], **TRACED)
    await client.add("cancelled", [3], **TRACED)
    await until(lambda: "cancelled" in server.service.requests.live)
    await client.abort("waiting")
    assert await client.cancel("cancelled") == ["cancelled"]
    await until(lambda: len(requests_of(recorder).spans) == 2)
    assert names(requests_of(recorder)) == ["queue", "queue"]
    told = {span.attributes["request_id"]: span for span in requests_of(recorder).spans}
    assert (told["waiting"].attributes["finish_reasons"], told["waiting"].error) == (("abort",), "")
    assert told["cancelled"].error == "the request failed"
    assert await client.cancel("running") == ["running"]
    await until_idle(server)


async def test_nothing_is_left_of_requests_however_they_ended(
    harness: Harness, settings: Settings, recorder: Recorder
) -> None:
    worker = await harness.worker(step_seconds=0.001)
    server = await harness.scheduler(settings(num_device_blocks=40, block_size=8, num_host_blocks=10))
    client = await harness.client()
    beams = sampling_pb2.BeamSearch(width=3, length_penalty=1.0)
    streams = [
        await client.add(f"r{number}", [number + 1] * 12, n=1 + number % 3, max_tokens=30, **TRACED)
        for number in range(12)
    ]
    streams.append(await client.add("beams", [1, 2, 3], n=2, max_tokens=10, beam_search=beams, **TRACED))
    streams.append(await client.add("never", [1] * 5000, **TRACED))
    await client.wait_until(lambda: sum(bool(stream.token_ids[0]) for stream in streams) > 3)
    await client.abort("r3")
    await client.abort("r4", 0, stop=True, num_tokens=1)
    assert await client.cancel("r5", "r6")
    await worker.kill()
    await harness.worker(step_seconds=0.001)
    for stream in streams:
        if stream.request_id not in ("r3", "r4"):
            with suppress(BlockyardError):
                await client.result(stream)
    await until_idle(server)
    spans = server.service.requests.spans
    assert (spans._watched, spans._by_sequence, spans._prefilling) == ({}, {}, set())
    assert len(requests_of(recorder).named("queue")) >= len(streams) - 1


async def test_a_request_of_a_scheduler_before_goes_on_in_its_trace(harness: Harness, recorder: Recorder) -> None:
    await harness.worker(step_seconds=0.002)
    async with harness.running_scheduler(), harness.gateway("one") as client:
        await client.wait_until_ready()
        stream = await client.add("r", [5, 6], max_tokens=60, **TRACED)
        await client.wait_until(lambda: len(stream.token_ids[0]) > 5)
    before = len(requests_of(recorder).spans)
    assert requests_of(recorder).one("decode").error == "the scheduler stopped"
    server = await harness.scheduler()
    client = await harness.client("two")
    await finished(client, await client.resubmit(stream), [5, 6], 60)
    await until_idle(server)
    assert names(requests_of(recorder))[before:] == ["queue", "prefill", "decode"]
    assert requests_of(recorder).trace_ids == {CALLER.trace_id}


async def test_a_resumed_request_still_has_its_context(harness: Harness, recorder: Recorder) -> None:
    await harness.worker(step_seconds=0.005)
    await harness.scheduler()
    client, other = await harness.client(), await harness.client("other")
    stream = await client.add("r", [5, 6], max_tokens=20, **TRACED)
    await client.wait_until(lambda: stream.token_ids[0])
    again = await other.read_again("r")
    await other.wait_until(lambda: again.resumed)
    assert again.resumed[0].submission == stream.submission
    await other.result(again)
    await client.result(stream)


async def test_debug_events_tell_the_same_of_all(
    harness: Harness, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "scheduler_service.requests.request_spans")
    use_tracer(None)
    await harness.worker()
    server = await harness.scheduler(settings(num_device_blocks=12, block_size=8, preemption_mode="recompute"))
    client = await harness.client()
    streams = [await client.add(f"r{number}", [number + 1] * 10, max_tokens=30) for number in range(6)]
    for stream in streams:
        await client.result(stream)
    await until_idle(server)
    told = [
        (record.message, record.fields["request_id"])  # type: ignore[attr-defined]
        for record in caplog.records
        if record.name == "scheduler_service.requests.request_spans"
    ]
    assert {message for message, _ in told} >= {
        "request leaves queue",
        "request leaves prefill",
        "request preempted",
        "request goes on",
        "request ended",
    }
    assert [message for message, name in told if name == "r0"][:2] == ["request leaves queue", "request leaves prefill"]
    assert {name for _, name in told} == {f"r{number}" for number in range(6)}
    [ended] = [
        record.fields  # type: ignore[attr-defined]
        for record in caplog.records
        if record.message == "request ended" and record.fields["request_id"] == "r0"  # type: ignore[attr-defined]
    ]
    assert (ended["num_completion_tokens"], ended["finish_reasons"]) == (30, "length")
    assert server.service.requests.spans._watched == {}
