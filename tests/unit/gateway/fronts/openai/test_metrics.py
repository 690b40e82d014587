"""`/metrics` on the HTTP port, and what it says of the calls and errors there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest

from blockyard.errors import BlockyardError, Reason
from gateway.fronts.http.metrics import add_metrics, with_request_counts
from gateway.fronts.openai.app import make_app
from gateway.fronts.openai.errors import error_object
from tests.kit.fakes.fake_scheduler import FakeScheduler
from tests.kit.processes.scrape import Scrape
from tests.unit.gateway.core import watch
from tests.unit.gateway.fronts.openai.serving import serve
from tests.unit.gateway.harness import serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from gateway.observe.metrics import GatewayMetrics

COMPLETIONS = "/v1/completions"


class Gateway:
    """A front with metrics, and a client."""

    def __init__(self, http: httpx.AsyncClient, metrics: GatewayMetrics) -> None:
        self.http = http
        self.metrics = metrics

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post(COMPLETIONS, json={"model": "demo", "prompt": "Once", "max_tokens": 5, **body})

    async def scrape(self) -> Scrape:
        return Scrape((await self.http.get("/metrics")).text)


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with FakeScheduler() as scheduler, serving(scheduler) as front:
        app, metrics = make_app(front.service), front.live.metrics
        watch(metrics, front.service, front.live, front.link)
        add_metrics(app, metrics)
        async with (
            serve(with_request_counts(app, metrics)) as url,
            httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http,
        ):
            yield Gateway(http, metrics)


async def test_answers_are_counted_by_path_and_code(gateway: Gateway) -> None:
    assert (await gateway.complete()).status_code == 200
    assert (await gateway.complete(stream=True)).text.endswith("data: [DONE]\n\n")
    seen = await gateway.scrape()
    assert seen.sum("blockyard_http_requests_total", method="POST", path=COMPLETIONS, code="200") == 2
    assert seen.sum("blockyard_output_tokens_total") == 10
    assert seen.sum("blockyard_errors_total") == 0
    again = await gateway.scrape()
    assert again.sum("blockyard_http_requests_total", path="/metrics", code="200") == 1


async def test_it_is_what_prometheus_asks_for(gateway: Gateway) -> None:
    plain = await gateway.http.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    assert (await gateway.http.get("/metrics", headers=accept)).text.endswith("# EOF\n")


async def test_errors_are_counted_by_their_reasons(gateway: Gateway) -> None:
    assert (await gateway.complete(temperature=-1)).status_code == 400
    assert (await gateway.complete(nonsense=1)).status_code == 400
    assert (await gateway.complete(model="other")).status_code == 404
    seen = await gateway.scrape()
    assert seen.sum("blockyard_errors_total", api="http", reason="FIELD_INVALID") == 2
    assert seen.sum("blockyard_errors_total", api="http", reason="MODEL_NOT_FOUND") == 1
    assert seen.sum("blockyard_http_requests_total", path=COMPLETIONS, code="400") == 2


async def test_a_stream_that_fails_half_way_has_a_good_code_and_an_error(gateway: Gateway) -> None:
    body = {"model": "demo", "prompt": "Once", "max_tokens": 400, "stream": True, "request_id": "one"}
    async with gateway.http.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        assert (await gateway.http.delete("/v1/requests/one")).json()["cancelled"]
        assert "CLIENT_CANCELLED" in "".join([line async for line in lines])
    seen = await gateway.scrape()
    assert seen.sum("blockyard_errors_total", api="http", reason="CLIENT_CANCELLED") == 1
    assert seen.sum("blockyard_http_requests_total", path=COMPLETIONS, code="200") == 1
    assert seen.sum("blockyard_finished_requests_total", result="CLIENT_CANCELLED") == 1


async def test_paths_and_methods_that_nobody_declared_are_one(gateway: Gateway) -> None:
    for number in range(3):
        await gateway.http.request("BREW", f"/coffee/{number}")
    await gateway.http.get("/v1/models/demo")
    seen = await gateway.scrape()
    assert seen.sum("blockyard_http_requests_total", method="other", path="other") == 3
    assert seen.sum("blockyard_http_requests_total", path="/v1/models/{name:path}", code="200") == 1


async def test_a_probe_that_is_told_no_is_no_error(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.generation.GenerationService.is_ready", lambda self: False)
    assert (await gateway.http.get("/health")).status_code == 503
    seen = await gateway.scrape()
    assert seen.sum("blockyard_errors_total") == 0
    assert seen.sum("blockyard_http_requests_total", path="/health", code="503") == 1
    assert seen.sum("blockyard_ready") == 0


async def test_an_application_that_breaks_is_counted_too(gateway: Gateway) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        error_object(BlockyardError(Reason.BUG, "a bug"))
        raise ConnectionResetError

    app = with_request_counts(broken, gateway.metrics)
    with pytest.raises(ConnectionResetError):
        await app({"type": "http", "method": "GET", "path": "/"}, None, None)  # type: ignore[arg-type]
    seen = await gateway.scrape()
    assert seen.sum("blockyard_http_requests_total", method="GET", path="other", code="499") == 1
    assert seen.sum("blockyard_errors_total", reason="BUG") == 1
