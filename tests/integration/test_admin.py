"""What an operator does to a running system, by the program's commands: nobody who reads a stream notices."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from blockyard import AsyncClient
from blockyard.cli.main import main
from blockyard.service.servers import internal_channel
from tests.kit.chaos.chaos_requests import make_requests
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.oracles.answers import run_alone
from tests.kit.processes.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.kit.oracles.answers import Known

NUM_STREAMS = 6
SCHEDULER_FLAGS = ["--dtype", "float32", "--num-device-blocks", "400", "--num-host-blocks", "32", "--debug-integrity"]


async def command(cluster: Cluster, *arguments: str) -> str:
    """Calls the program as an operator does, but for its process; gives what it writes."""

    def call() -> str:
        with redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as caught:
            main([*arguments, "--admin-address", cluster.admin_addresses[0]])
        assert not caught.value.code, arguments
        return out.getvalue()

    async with asyncio.timeout(60):
        return await asyncio.to_thread(call)


async def admin(cluster: Cluster, *arguments: str) -> Any:
    """Calls `blockyard admin`; gives its JSON."""
    told = await command(cluster, "admin", *arguments, *([] if arguments[0] == "dump" else ["--json"]))
    return json.loads(told)


@asynccontextmanager
async def load(client: AsyncClient, known: list[Known]) -> AsyncIterator[None]:
    """Asks the same again and again meanwhile, and holds each answer against the one that was given alone."""
    is_over = asyncio.Event()

    async def ask(one: Known, name: str) -> list[str]:
        wrong: list[str] = []
        while not is_over.is_set():
            wrong.append((await one.check(client, f"{name}-{len(wrong)}"))[1])
        return [told for told in wrong if told]

    streams = [asyncio.create_task(ask(one, f"stream-{number}")) for number, one in enumerate(known)]
    try:
        yield
    finally:
        is_over.set()
        assert [wrong for stream in streams for wrong in await stream] == []


def num_steps(status: dict[str, Any]) -> list[int]:
    return [int(replica["numSteps"]) for replica in status["scheduler"]["replicas"]]


async def until_ready(cluster: Cluster, service: str = "readiness", *, ready: bool = True) -> None:
    """Waits until the gateway's admin port says that it is ready, or is not."""
    wanted = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
    async with internal_channel(cluster.admin_addresses[0]) as channel, asyncio.timeout(30):
        request = health_pb2.HealthCheckRequest(service=service)
        async for response in health_pb2_grpc.HealthStub(channel).Watch(request):
            if response.status == wanted:
                return


async def test_an_operator_works_under_load(tmp_path: Path) -> None:
    async with Cluster(tiny_model("llama"), tmp_path, num_gateways=1, scheduler_flags=SCHEDULER_FLAGS) as cluster:
        await cluster.wait_until_ready()
        async with AsyncClient(cluster.targets) as client:
            known = await run_alone(client, make_requests(6, NUM_STREAMS))
            async with load(client, known):
                await check_drains(cluster)
                await check_profile(cluster, tmp_path / "trace.json")
                await check_what_is_told(cluster)
                await check_gateway(cluster)
            await check_cache(cluster, client)
        cluster.check()
        assert [cluster.num_deaths(name) for name in cluster.members] == [0] * len(cluster.members)


async def check_drains(cluster: Cluster) -> None:
    """Each replica is drained in turn, and computes nothing until it is undrained."""
    for replica in ("0", "1"):
        assert (await admin(cluster, "drain", replica))["handsOver"]
        before = await admin(cluster, "status")
        assert before["scheduler"]["replicas"][int(replica)]["drainState"] == "DRAIN_STATE_DRAINED"
        assert before["gateway"]["ready"]
        after = await admin(cluster, "status")
        assert num_steps(after)[int(replica)] == num_steps(before)[int(replica)]
        assert num_steps(after)[1 - int(replica)] > num_steps(before)[1 - int(replica)]
        address = after["scheduler"]["replicas"][int(replica)]["workers"][0]["address"]
        await admin(cluster, "undrain", address)
        await cluster.wait_until_ready()
    await admin(cluster, "drain", "0")
    # Nobody is left to go on with what it has: it does so itself, and what comes waits.
    assert not (await admin(cluster, "drain", "1", "--no-wait"))["handsOver"]
    async with asyncio.timeout(30):
        while not (await cluster.status()).scheduler.num_waiting_requests:  # noqa: ASYNC110 - what a service says
            await asyncio.sleep(0.005)
    assert not (await cluster.status()).gateway.ready
    for replica in ("0", "1"):
        await admin(cluster, "undrain", replica)
    await cluster.wait_until_ready()


def read_events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_bytes())["traceEvents"]


async def check_profile(cluster: Cluster, path: Path) -> None:
    """Both replicas have streams, so either gives steps."""
    summary = await admin(cluster, "profile", "0", "--seconds", "0.3", "--output", str(path))
    events = read_events(path)
    steps = [event for event in events if event["name"] == "step"]
    assert len(steps) == summary["numSteps"] > 0
    assert {"forward", "sample", "cache operations"} <= {event["name"] for event in events}
    assert sum(step["args"]["num_tokens"] for step in steps) > 0


async def check_what_is_told(cluster: Cluster) -> None:
    state = await admin(cluster, "dump")
    assert state["numRequests"] == len(state["requests"]) > 0
    assert all(sequence["status"] for request in state["requests"] for sequence in request["sequences"])
    frame = await command(cluster, "top", "--once", "--interval", "0.2")
    assert "ready" in frame and "device blocks" in frame
    assert "worker-1" in await command(cluster, "admin", "status")
    levels = await admin(cluster, "log-level", "debug")
    assert [each["message"] for each in levels["processes"]] == ["", "", "", ""]
    async with asyncio.timeout(30):
        # What a process writes sets no event here.
        while not all("D " in cluster.log(name) for name in ("scheduler", "gateway-0")):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    await admin(cluster, "log-level", "info", "gateway")


async def check_gateway(cluster: Cluster) -> None:
    """It says that it is not ready, and serves on: the load goes through it all the time."""
    await admin(cluster, "drain", "gateway", "--no-wait")
    await until_ready(cluster, ready=False)
    await admin(cluster, "undrain", "gateway")
    await until_ready(cluster)


async def check_cache(cluster: Cluster, client: AsyncClient) -> None:
    """A prompt is found in the cache, and after a reset it is not."""
    prompt = list(range(20, 120))

    async def num_cached() -> int:
        return (await client.generate(prompt, max_tokens=2, temperature=0.0)).usage.num_cached_tokens

    for _ in range(3):
        # Once on each replica at the latest.
        await num_cached()
    assert await num_cached() > 0
    forgotten = (await admin(cluster, "reset-cache"))["replicas"]
    assert sum(each["numForgottenDeviceBlocks"] for each in forgotten) > 0
    assert [each["numKeptDeviceBlocks"] for each in forgotten] == [0, 0]
    assert await num_cached() == 0
