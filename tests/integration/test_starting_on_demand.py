"""From no worker to an answer: requests wait at a gateway that is ready all along, and start the worker."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard.client.sync import Client
from blockyard.contract.events import Loading
from tests.kit.processes.system import System
from tests.unit.gateway.harness import DEMO_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    """A gateway and a scheduler without a worker."""
    system = System(DEMO_MODEL, tmp_path, gateway_flags=("--starts-on-demand",))
    with ExitStack() as stack:
        stack.push(system)
        system.start_service("scheduler")
        system.start_service("gateway")
        system.wait_until_ready()
        yield system


def wait_for_waiting_requests(url: str) -> None:
    """Reads the metric as an autoscaler does, until a request waits."""
    for _ in range(1000):
        metrics = httpx.get(f"{url}/metrics").text
        if 'blockyard_gateway_waiting_requests{model="demo"} 1.0' in metrics:
            return
    raise AssertionError(f"no request waits:\n{metrics}")


def read_statuses(watch: Any, statuses: list[int]) -> None:
    with suppress(grpc.RpcError):
        statuses.extend(each.status for each in watch)


@pytest.mark.timeout(120)
def test_a_request_waits_for_a_worker_and_the_gateway_is_never_red(system: System) -> None:
    statuses: list[int] = []
    with grpc.insecure_channel(system.grpc_target) as channel, ThreadPoolExecutor(1) as pool:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        watcher = threading.Thread(target=read_statuses, args=(watch, statuses))
        watcher.start()
        client = Client(system.grpc_target)
        waiting = pool.submit(client.generate, "Once upon a time", max_tokens=4, temperature=0.0)
        wait_for_waiting_requests(system.http_url)
        system.start_service("worker")
        first = waiting.result(60)
        # The last worker goes, and the next request starts another one.
        system.services["worker"].stop()
        waiting = pool.submit(client.generate, "Once upon a time", max_tokens=4, temperature=0.0)
        wait_for_waiting_requests(system.http_url)
        system.start_service("worker")
        assert waiting.result(60).text == first.text != ""
        client.close()
        watch.cancel()
        watcher.join()
    assert set(statuses) == {SERVING}


@pytest.mark.timeout(120)
def test_streams_tell_how_far_the_loading_is(system: System) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "stream": True}
    url = f"{system.http_url}/v1/completions"
    with (
        Client(system.grpc_target) as client,
        client.stream("Once upon a time", max_tokens=4, temperature=0.0) as stream,
        httpx.stream("POST", url, json=body, timeout=60) as served,
        httpx.stream("POST", url, json={**body, "max_tokens": 10_000}, timeout=60) as refused,
    ):
        assert isinstance(event := next(stream), Loading)
        assert event.message.startswith("loading demo: no worker answers at unix:")
        # Both have begun with a comment, so that their status is no more to be chosen.
        assert [each.status_code for each in (served, refused)] == [200, 200]
        system.start_service("worker")
        text = "".join(stream.text_deltas())
        lines, errors = list(served.iter_lines()), list(refused.iter_lines())
    assert lines[0] == f": {event.message}"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]) == text != ""
    assert lines[-2] == "data: [DONE]"
    assert json.loads(errors[-2][6:])["error"]["reason"] == "FIELD_INVALID"
