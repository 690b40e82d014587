"""OpenTelemetry's names for servers of generative AI, and traces of values, as a scraper of the gateway gets them."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from blockyard.errors import BlockyardError, Reason
from gateway.observe.gen_ai_metrics import CATALOGUE, SWITCH, is_opted_in
from gateway.server import Server
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.processes.scrape import Scrape
from tests.kit.processes.spans import recorded_spans
from tests.unit.gateway.harness import configuration, demo_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# The conventions of August 2026: docs/gen-ai/gen-ai-metrics.md of open-telemetry/semantic-conventions-genai.
ADVISED = {
    "gen_ai_server_request_duration_seconds": (
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    "gen_ai_server_time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    ),
}
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
CALLS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Once upon a time"},
    "chat/completions": {"messages": [{"role": "user", "content": "Once upon a time"}]},
}


@asynccontextmanager
async def running_gateway() -> AsyncIterator[tuple[Server, FakeScheduler]]:
    async with FakeScheduler(model_digest=demo_tokenizer().model_digest) as scheduler:
        gateway = Server(configuration(scheduler))
        await gateway.start()
        try:
            link = gateway.generation.model_of("").link
            async with asyncio.timeout(10):
                await link.wait_until(lambda: link.takes_requests)
            yield gateway, scheduler
        finally:
            await gateway.stop()


async def ask(gateway: Server, path: str, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http_port}/v1/") as http:
        return await http.post(path, json={**CALLS[path], "max_tokens": 5, **fields})


def get(port: int, accept: str) -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=20) as response:
        return response.read().decode()


async def scrape(gateway: Server, accept: str = "") -> str:
    return await asyncio.to_thread(get, gateway.http_port, accept)


@pytest.mark.parametrize(
    ("value", "is_on"),
    [
        ("", False),
        ("http", False),
        ("gen_ai_latest_experimental", True),
        ("http, gen_ai_latest_experimental,database/dup", True),
    ],
)
def test_opentelemetrys_switch_turns_them_on(value: str, is_on: bool) -> None:
    assert is_opted_in({SWITCH: value}) is is_on
    assert not is_opted_in({})


def test_bounds_are_those_that_the_conventions_advise() -> None:
    assert {metric.name: metric.bounds for metric in CATALOGUE} == ADVISED


async def test_generations_are_measured_by_operation_and_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "gen_ai_latest_experimental")
    async with running_gateway() as (gateway, _):
        before = Scrape(await scrape(gateway))
        for path in CALLS:
            assert (await ask(gateway, path)).status_code == 200
        seen = Scrape(await scrape(gateway))
    assert gateway.metrics.registry.find_missing == []
    assert [metric.name for metric in CATALOGUE if not seen.has(metric)] == []
    labels = {"gen_ai_provider_name": "blockyard", "gen_ai_request_model": "demo", "gen_ai_response_model": "demo"}
    for operation in ("chat", "text_completion"):
        of_operation = {**labels, "gen_ai_operation_name": operation}
        for name in ADVISED:
            assert before.sum(f"{name}_count", **of_operation) == 0
            assert seen.sum(f"{name}_count", **of_operation) == 1
        first, whole, each = (
            seen.sum(f"gen_ai_server_{name}_seconds_sum", **of_operation)
            for name in ("time_to_first_token", "request_duration", "time_per_output_token")
        )
        assert 0 < first <= whole
        assert each == pytest.approx((whole - first) / 4)
    durations = seen.labels("gen_ai_server_request_duration_seconds_count")
    assert {label["error_type"] for label in durations} == {""}


async def test_a_request_that_fails_has_a_duration_with_its_error_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(SWITCH, "gen_ai_latest_experimental")
    async with running_gateway() as (gateway, scheduler):
        scheduler.refusals["r"] = BlockyardError(Reason.QUEUE_FULL, "too many")
        assert (await ask(gateway, "completions", request_id="r")).status_code == 429
        seen = Scrape(await scrape(gateway))
    failed = {"gen_ai_operation_name": "text_completion", "error_type": "QUEUE_FULL"}
    assert seen.sum("gen_ai_server_request_duration_seconds_count", **failed) == 1
    assert seen.sum("gen_ai_server_request_duration_seconds_count") == 1
    assert seen.sum("gen_ai_server_time_to_first_token_seconds_count") == 0


async def test_without_the_switch_none_of_the_names_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    async with running_gateway() as (gateway, _):
        assert (await ask(gateway, "completions")).status_code == 200
        assert "gen_ai" not in await scrape(gateway)


async def test_values_of_traced_requests_name_their_traces_in_openmetrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "gen_ai_latest_experimental")
    with recorded_spans() as recorder:
        async with running_gateway() as (gateway, _):
            assert (await ask(gateway, "completions", stream=True)).status_code == 200
            (trace_id,) = {span.trace_id for span in recorder.seen.spans}
            text, plain = await scrape(gateway, OPENMETRICS), await scrape(gateway)
    found = {
        sample.name: sample.exemplar.labels
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.exemplar
    }
    names = ("time_to_first_token_seconds", "request_latency_seconds", "time_per_output_token_seconds")
    expected = [*(f"blockyard_{name}_bucket" for name in names), *(f"{name}_bucket" for name in ADVISED)]
    assert found.keys() >= set(expected)
    assert all(labels == {"trace_id": trace_id} for labels in found.values())
    assert trace_id not in plain


async def test_requests_that_are_not_traced_leave_no_exemplar() -> None:
    async with running_gateway() as (gateway, _):
        assert (await ask(gateway, "completions")).status_code == 200
        assert "trace_id" not in await scrape(gateway, OPENMETRICS)
