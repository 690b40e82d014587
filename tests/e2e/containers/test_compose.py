"""The compose file as an operator uses it: it becomes healthy, outlives what dies, and drains when it is taken down."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import signal
import sys
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING

import pytest
from google.protobuf import json_format

from blockyard import AsyncClient, Client
from blockyard.admin.v1 import admin_pb2
from blockyard.errors import BlockyardError, Reason
from tests.e2e.containers.conftest import BASE_IMAGE
from tests.e2e.containers.streams import Streams, make_requests
from tests.kit.chaos.chaos_requests import TEXTS
from tests.kit.oracles.answers import run_alone
from tests.kit.processes.containers import BUILD_SECONDS, ROOT, now, wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from docker.models.containers import Container

    from tests.kit.oracles.answers import Known
    from tests.kit.processes.containers import Project

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
GUIDE = ROOT / "docs" / "guides" / "compose.md"
NUM_STREAMS = 12
PROMETHEUS = """
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
RUN apt-get update && apt-get install --yes --no-install-recommends prometheus
RUN install --directory --owner nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
"""


@pytest.fixture(scope="module")
def running(project: Project) -> Iterator[Project]:
    """The services of the profile that is the default, healthy."""
    project.up()
    yield project
    project.down()


@pytest.fixture(scope="module")
def prometheus_image(project: Project) -> str:
    """Debian's Prometheus, started as the image of its makers is."""
    tag = "blockyard-prometheus:e2e"
    project.engine.images.build(
        fileobj=io.BytesIO(PROMETHEUS.encode()),
        tag=tag,
        buildargs={"BASE_IMAGE": BASE_IMAGE},
        network_mode="host",
        rm=True,
    )
    return tag


@pytest.fixture
async def client(running: Project) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(running.grpc_target) as client:
        await client.wait_until_ready(60)
        yield client


@pytest.fixture(scope="module")
def undisturbed() -> list[Known]:
    """The answers, once they are known."""
    return []


@pytest.fixture
async def known(client: AsyncClient, undisturbed: list[Known]) -> list[Known]:
    """Requests, and what each was answered alone."""
    if not undisturbed:
        undisturbed += await run_alone(client, make_requests(NUM_STREAMS))
    return undisturbed


def test_each_starts_when_the_one_behind_it_is_healthy(project: Project) -> None:
    since = now()
    try:
        project.run(["make", "up"], BUILD_SECONDS)
        seen = [(name, event["Action"]) for name, event in project.events(since, "start", "health_status")]
    finally:
        project.down()
    firsts = list(dict.fromkeys(seen))
    assert firsts == [
        (name, action) for name in ("worker", "scheduler", "gateway") for action in ("start", "health_status: healthy")
    ]
    assert not project.containers()


def test_a_client_of_http_streams(running: Project) -> None:
    body = {"model": "demo", "prompt": TEXTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{running.port('http')}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        events = [line.removeprefix(b"data: ").strip() for line in response if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    assert sum(bool(json.loads(event)["choices"][0]["text"]) for event in events[:-1]) > 3


def test_the_command_line_is_in_the_image(running: Project) -> None:
    told = running.compose("exec", "-T", "gateway", "blockyard", "generate", TEXTS[0], "--max-tokens", "8")
    assert told.strip()


def test_prometheus_finds_every_service(running: Project, prometheus_image: str) -> None:
    running.environment |= {"COMPOSE_PROFILES": "cpu,monitoring", "PROMETHEUS_IMAGE": prometheus_image}
    try:
        running.compose("up", "--detach")
        wait_until(lambda: series_by_job(running, "up == 1") == dict.fromkeys(("gateway", "scheduler", "worker"), 1))
        found = series_by_job(running, '{__name__=~"blockyard_.+"}')
        assert all(found[name] > 5 for name in ("gateway", "scheduler", "worker"))
    finally:
        running.container("prometheus").remove(force=True)
        del running.environment["COMPOSE_PROFILES"]


def series_by_job(project: Project, query: str) -> dict[str, int]:
    """Asks Prometheus how many series a query finds of each service; nothing, while it does not answer."""
    parameters = urllib.parse.urlencode({"query": f"count by (job) ({query})"})
    url = f"http://127.0.0.1:{project.port('prometheus')}/api/v1/query?{parameters}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            told = json.load(response)
    except OSError:
        return {}
    return {one["metric"]["job"]: int(one["value"][1]) for one in told["data"]["result"]}


async def test_streams_are_what_they_are_alone(client: AsyncClient, known: list[Known]) -> None:
    async with Streams(client, known, "together") as streams:
        assert await streams.differences() == []


async def test_a_worker_that_is_killed_comes_back_and_nothing_is_lost(
    running: Project, client: AsyncClient, known: list[Known]
) -> None:
    worker = running.container("worker")
    async with Streams(client, known, "killed") as streams:
        os.kill(worker.attrs["State"]["Pid"], signal.SIGKILL)
        assert await streams.differences() == []
        assert all(len(transcript.recoveries) == 1 for transcript in streams.transcripts)
        assert all(transcript.recoveries[0].exact for transcript in streams.transcripts)
    worker.reload()
    assert worker.attrs["RestartCount"] == 1
    assert running.container("worker").id == worker.id
    running.wait_until_healthy()


def num_ready(project: Project) -> int:
    """Workers that compute, as the scheduler has it."""
    # The admin port is open inside the gateway's container alone.
    answer = project.compose("exec", "-T", "gateway", "blockyard", "admin", "status", "--json")
    status = json_format.Parse(answer, admin_pb2.GetStatusResponse())
    return sum(replica.ready for replica in status.scheduler.replicas)


@pytest.fixture
def two_workers(running: Project) -> Iterator[list[Container]]:
    """Both compute. Afterwards there is one again."""
    running.up("--scale", "worker=2", "--no-recreate")
    wait_until(lambda: num_ready(running) == 2)
    yield running.containers("worker")
    running.up("--scale", "worker=1", "--no-recreate")
    wait_until(lambda: num_ready(running) == 1)


async def test_one_of_two_workers_is_killed_for_good_and_nothing_is_lost(
    running: Project, two_workers: list[Container], client: AsyncClient, known: list[Known]
) -> None:
    async with Streams(client, known, "of-two") as streams:
        await asyncio.to_thread(two_workers[0].kill)
        assert await streams.differences() == []
        # Some ran on it, and some on the other one.
        assert 0 < sum(len(transcript.recoveries) for transcript in streams.transcripts) < len(known)
    two_workers[0].reload()
    assert two_workers[0].status == "exited"
    assert num_ready(running) == 1


@pytest.mark.parametrize("service", ["worker", "scheduler", "gateway"])
async def test_a_service_is_replaced_and_nothing_is_lost(
    running: Project, client: AsyncClient, known: list[Known], service: str
) -> None:
    before = running.container(service).id
    async with Streams(client, known, f"replaced-{service}") as streams:
        replacing = asyncio.create_task(
            asyncio.to_thread(running.compose, "up", "--detach", "--no-deps", "--force-recreate", service)
        )
        assert await streams.differences() == []
        await replacing
    assert running.container(service).id != before
    await asyncio.to_thread(running.wait_until_healthy)


async def test_down_drains(running: Project, client: AsyncClient, known: list[Known]) -> None:
    since = now()
    async with Streams(client, known, "down") as streams:
        down = asyncio.create_task(asyncio.to_thread(running.down))
        assert await streams.differences() == []
        assert all(transcript.num_resumes == 0 for transcript in streams.transcripts)
        await down
    told = {name: event["time"] for name, event in running.events(since, "kill") if event["Action"] == "kill"}
    assert told["gateway"] <= streams.ended_at, "the streams had ended before it was told to stop"
    ended = [(name, event["Actor"]["Attributes"]["exitCode"]) for name, event in running.events(since, "die")]
    assert ended == [("gateway", "0"), ("scheduler", "0"), ("worker", "0")]
    assert not running.containers()


@pytest.fixture
def own_model(project: Project, tmp_path: Path) -> Iterator[str]:
    """The name of a model in a folder of its own, which is served."""
    shutil.copytree(ROOT / "models" / "demo", tmp_path / "my-model")
    variables = {"BLOCKYARD_MODELS": str(tmp_path), "BLOCKYARD_MODEL_NAME": "my-model"}
    tmp_path.chmod(0o755)
    project.environment |= variables
    project.up()
    yield "my-model"
    project.down()
    for name in variables:
        del project.environment[name]


def test_a_model_is_served_from_a_folder_that_is_mounted(project: Project, own_model: str) -> None:
    with Client(project.grpc_target) as client:
        assert [model.name for model in client.list_models()] == [own_model]
        assert client.generate(TEXTS[0], max_tokens=3).text


@pytest.fixture
def secret(project: Project, tmp_path: Path) -> Iterator[str]:
    """A key for the services that the guide's override starts."""
    (block,) = re.findall(r"## Keys.*?```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert "/etc/blockyard/gateway:" in block
    override = tmp_path / "docker-compose.override.yml"
    override.write_text(block.replace("/etc/blockyard/gateway:", f"{tmp_path}:"))
    made = project.run(
        [sys.executable, "-m", "blockyard.cli.main", "keys", "make", "e2e", "--file", f"{tmp_path}/keys.yaml"]
    )
    (tmp_path / "keys.yaml").chmod(0o644)
    tmp_path.chmod(0o755)
    project.environment["COMPOSE_FILE"] = f"docker-compose.yml{os.pathsep}{override}"
    project.up()
    yield made.split()[0]
    project.down()
    del project.environment["COMPOSE_FILE"]


def test_keys_are_asked_for_where_an_override_brings_them(project: Project, secret: str) -> None:
    with Client(project.grpc_target) as stranger, pytest.raises(BlockyardError) as refused:
        stranger.generate(TEXTS[0], max_tokens=3)
    assert refused.value.reason is Reason.UNAUTHENTICATED
    with Client(project.grpc_target, api_key=secret) as client:
        assert client.generate(TEXTS[0], max_tokens=3).text
