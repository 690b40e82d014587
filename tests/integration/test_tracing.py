"""One trace from the client to the step, over three services and the death of each, and logs that join by its ids."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from blockyard import AsyncClient
from blockyard.contract.events import Delta
from blockyard.load.http_stream import post_events
from tests.kit.fakes.collector import Collector
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.processes.cluster import Cluster
from tests.kit.processes.spans import CALLER

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from blockyard.client.asynchronous import AsyncStream
    from tests.kit.processes.spans import Seen

FLAGS = ["--dtype", "float32", "--num-device-blocks", "200"]
LOG = ["--log-format", "json", "--log-level", "debug"]
PROMPT = [5, 6, 7, 8, 9]
SECRET = "an unlikely secret"
# Long enough that nothing is killed too late.
NUM_TOKENS = 800
GATEWAY, SCHEDULER, WORKER = "blockyard-gateway", "blockyard-scheduler", "blockyard-worker"
TRACER = TracerProvider(shutdown_on_exit=False).get_tracer("user")
WHOLE = {
    (GATEWAY, "request"),
    (GATEWAY, "tokenize"),
    (SCHEDULER, "queue"),
    (SCHEDULER, "prefill"),
    (SCHEDULER, "decode"),
    (WORKER, "prefill step"),
    (WORKER, "decode steps"),
}


def names(seen: Seen) -> set[tuple[str, str]]:
    return {(span.service, span.name) for span in seen.spans}


def ask(client: AsyncClient, request_id: str) -> tuple[AsyncStream, str]:
    """Begins an answer within a span, and tells the trace."""
    with TRACER.start_as_current_span("user's own") as span:
        stream = client.stream(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, request_id=request_id)
        return stream, f"{span.get_span_context().trace_id:032x}"


async def read_past(stream: AsyncStream, num_tokens: int) -> None:
    """Reads until so many tokens have come."""
    async for event in stream:
        if isinstance(event, Delta) and event.num_tokens >= num_tokens:
            return


async def spans_of(collector: Collector, trace_id: str, is_there: Callable[[Seen], bool]) -> Seen:
    """Waits until a trace has what it is to have, and gives all that it has."""
    seen = await asyncio.to_thread(collector.wait_until, lambda seen: is_there(seen.of_trace(trace_id)))
    return seen.of_trace(trace_id)


def is_whole(seen: Seen) -> bool:
    return names(seen) >= WHOLE


def events_of(cluster: Cluster, name: str, request_id: str) -> list[dict[str, Any]]:
    """What a process has logged of a request."""
    events = [json.loads(line) for line in cluster.log(name).splitlines() if line.startswith("{")]
    return [event for event in events if event.get("request_id") == request_id]


async def finish(stream: AsyncStream) -> None:
    answer = await stream.result()
    assert answer.usage.num_completion_tokens == NUM_TOKENS


async def test_one_trace_over_all_services_and_the_death_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as collector:
        flags = ["--trace-endpoint", collector.grpc_endpoint, *LOG]
        cluster = Cluster(
            tiny_model("llama"),
            tmp_path,
            scheduler_flags=[*FLAGS, *flags],
            worker_flags=["--num-threads", "1", *flags],
            gateway_flags=flags,
        )
        async with cluster:
            await cluster.wait_until_ready()
            async with AsyncClient(cluster.targets) as client:
                await check_undisturbed(client, collector, cluster)
                await check_worker_death(client, collector, cluster)
                await check_scheduler_death(client, collector, cluster)
                await check_gateway_death(client, collector, cluster)
            await cluster.wait_until_ready()
            await check_http(collector, cluster)
            cluster.check()
        told = [cluster.log(name) for name in cluster.members] + [repr(collector.seen.spans)]
        assert not [text for text in told if SECRET in text]


async def check_undisturbed(client: AsyncClient, collector: Collector, cluster: Cluster) -> None:
    stream, trace_id = ask(client, "undisturbed")
    await finish(stream)
    seen = await spans_of(collector, trace_id, is_whole)
    request = seen.one("request")
    assert request.parent_id
    assert {span.parent_id for span in seen.spans if span is not request} == {request.span_id}
    assert request.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    assert request.events[:2] == ("accepted", "first token")
    assert seen.one("decode steps").attributes["num_steps"] == NUM_TOKENS - 1
    assert request.start_seconds <= seen.one("queue").start_seconds <= seen.one("prefill step").start_seconds
    assert not [span.error for span in seen.spans if span.error]
    # From a bucket of a histogram one comes to the trace of a request that fell into it.
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with httpx.AsyncClient(headers=accept) as http:
        scrapes = [(await http.get(f"{url}/metrics")).text for url in cluster.http_urls]
    found = {sample.name for text in scrapes for sample in _exemplary(text, trace_id)}
    assert "blockyard_time_to_first_token_seconds_bucket" in found


def _exemplary(text: str, trace_id: str) -> list[Any]:
    """Finds the samples of a scrape whose exemplar is of a trace."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [each for each in samples if each.exemplar and each.exemplar.labels == {"trace_id": trace_id}]


async def check_worker_death(client: AsyncClient, collector: Collector, cluster: Cluster) -> None:
    stream, trace_id = ask(client, "worker-dies")
    await read_past(stream, 20)
    status = await cluster.status()
    [busy] = [number for number, replica in enumerate(status.scheduler.replicas) if replica.num_running_sequences]
    cluster.kill(f"worker-{busy}")
    await finish(stream)
    # What the worker had not sent is lost with it.
    seen = await spans_of(collector, trace_id, lambda seen: is_whole(seen) and goes_on_after(seen, SCHEDULER))
    recovery = seen.one("recovery")
    assert recovery.attributes["cause"] == "the worker was lost"
    assert [span.error for span in seen.named("decode")] == ["the worker was lost", ""]
    assert "recovered" in seen.one("request").events
    check_worker_death_log(cluster, trace_id)


def goes_on_after(seen: Seen, service: str) -> bool:
    """Whether the request has been computed to its end after a recovery that a service tells of."""
    begins = [span.start_seconds for span in seen.named("recovery", service)]
    return bool(begins) and all(
        any(span.start_seconds >= max(begins) for span in seen.named(name))
        for name in ("prefill", "decode", "prefill step", "decode steps")
    )


def check_worker_death_log(cluster: Cluster, trace_id: str) -> None:
    """The lines of both services on one request, joined by its id, tell the whole."""
    [gateway] = [name for name in ("gateway-0", "gateway-1") if events_of(cluster, name, "worker-dies")]
    told = events_of(cluster, gateway, "worker-dies")
    assert {event["trace_id"] for event in told} == {trace_id}
    assert [event["message"] for event in told] == [
        "request submitted",
        "request accepted",
        "first token",
        "request recovered",
        "request finished",
    ]
    last = told[-1]
    assert (last["level"], last["num_recoveries"], last["num_completion_tokens"]) == ("info", 1, NUM_TOKENS)
    scheduled = [event["message"] for event in events_of(cluster, "scheduler", "worker-dies")]
    assert scheduled.index("request lost its worker") < scheduled.index("request ended")
    began = [event for name in ("worker-0", "worker-1") for event in events_of(cluster, name, "worker-dies")]
    assert [event["message"] for event in began] == ["sequence begins"] * 2
    assert {event["trace_id"] for event in began} == {trace_id}
    events = [json.loads(line) for line in cluster.log("scheduler").splitlines()]
    loud = [event["message"] for event in events if event["level"] in ("warning", "error")]
    assert "the worker was lost" in loud
    assert "steps are answered again" in [event["message"] for event in events]


async def check_scheduler_death(client: AsyncClient, collector: Collector, cluster: Cluster) -> None:
    stream, trace_id = ask(client, "scheduler-dies")
    await read_past(stream, 20)
    cluster.kill("scheduler")
    await finish(stream)
    seen = await spans_of(collector, trace_id, lambda seen: is_whole(seen) and goes_on_after(seen, GATEWAY))
    recovery, request = seen.one("recovery"), seen.one("request")
    assert (recovery.service, recovery.attributes["cause"]) == (GATEWAY, "the scheduler was lost")
    assert request.events == ("accepted", "first token", "recovered", "accepted")
    # The worker was told of its new scheduler by the end of the old one's stream.
    lost, again = seen.named("decode steps")
    assert (lost.error, again.error) == ("the step stream ended", "")


async def check_gateway_death(client: AsyncClient, collector: Collector, cluster: Cluster) -> None:
    stream, trace_id = ask(client, "gateway-dies")
    await read_past(stream, 20)
    [gateway] = [name for name in ("gateway-0", "gateway-1") if events_of(cluster, name, "gateway-dies")]
    cluster.kill(gateway)
    await finish(stream)
    assert stream.num_resumes
    whole = WHOLE - {(GATEWAY, "tokenize")}
    request = (await spans_of(collector, trace_id, lambda seen: names(seen) >= whole)).one("request")
    assert request.attributes["taken_over"] is True
    assert "resumed" in request.events


async def check_http(collector: Collector, cluster: Cluster) -> None:
    body = {"prompt": f"{SECRET} in a prompt", "max_tokens": 5, "ignore_eos": True, "stream": True, "temperature": 0}
    headers = CALLER._asdict()
    events = [event async for event in post_events(f"{cluster.http_urls[0]}/v1/completions", body, headers)]
    assert events
    request = (await spans_of(collector, CALLER.trace_id, is_whole)).one("request")
    assert request.parent_id in CALLER.traceparent
    assert request.attributes["method"] == "POST /v1/completions"
