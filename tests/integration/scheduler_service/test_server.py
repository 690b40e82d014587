"""The process: what it prints, how it ends, its health; and a worker process that is killed under it."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.kit.fakes.token_client import TokenClient
from tests.kit.oracles.token_oracle import oracle
from tests.kit.processes.system import ROOT, Service

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def start(tmp_path: Path, sockets: str) -> Iterator[Callable[..., Service]]:
    """Starts processes of the test: the scheduler or the fake worker, on its sockets."""
    services: list[Service] = []

    def begin(module: str, *flags: str) -> Service:
        address = ["--worker-address", f"unix:{sockets}/worker"]
        service = Service(module, [*address, *flags], tmp_path / f"{module}{len(services)}.log")
        services.append(service)
        return service

    yield begin
    for service in services:
        service.stop()


def scheduler(start: Callable[..., Service], sockets: str, *flags: str) -> Service:
    address = ["--scheduler-address", f"unix:{sockets}/scheduler", "--model", "fake"]
    return start("scheduler_service", *address, "--log-level", "debug", *flags)


def health(address: str, service: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=10).status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(start: Callable[..., Service], sockets: str, number: signal.Signals) -> None:
    service = scheduler(start, sockets)
    service.wait_for_log(r"listening .*scheduler_address=unix:")
    assert service.stop(number) == 0
    assert "Traceback" not in service.log


# A scheduler whose end takes for ever.
STUCK = """
import asyncio
import scheduler_service.server as server

async def stop(self):
    await asyncio.Event().wait()

server.Server.stop = stop
server.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(sockets: str, number: signal.Signals) -> None:
    address = ["--scheduler-address", f"unix:{sockets}/scheduler"]
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, *address], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for awaited in ("listening", "stopping"):
            while awaited not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(number)
        assert process.wait(20) == -number


def test_it_tells_the_port_it_got_and_a_taken_one_is_an_error(start: Callable[..., Service]) -> None:
    first = start("scheduler_service", "--scheduler-address", "127.0.0.1:0")
    port = first.wait_for_log(r"scheduler_address=127\.0\.0\.1:(\d+)").group(1)
    second = start("scheduler_service", "--scheduler-address", f"127.0.0.1:{port}")
    assert second.process.wait(20) == 1
    assert len([line for line in second.log.splitlines() if "cannot listen" in line]) == 1
    assert "Traceback" not in second.log


def test_a_taken_health_port_is_an_error(start: Callable[..., Service], sockets: str) -> None:
    first = scheduler(start, sockets, "--scheduler-health-port", "0")
    port = first.wait_for_log(r"health_address=127\.0\.0\.1:(\d+)").group(1)
    second = start("scheduler_service", "--scheduler-address", "127.0.0.1:0", "--scheduler-health-port", port)
    assert second.process.wait(20) == 1
    assert "Traceback" not in second.log


def test_a_bad_setting_is_told() -> None:
    arguments = [sys.executable, "-m", "scheduler_service", "--max-num-seqs", "0"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "--max-num-seqs" in done.stderr


def test_without_a_worker_it_lives_and_is_not_ready(start: Callable[..., Service], sockets: str) -> None:
    service = scheduler(start, sockets, "--scheduler-health-port", "0")
    own = service.wait_for_log(r"health_address=(\S+)").group(1)
    service.wait_for_log(r"the replica is not ready reason=.no worker answers")
    serving = health_pb2.HealthCheckResponse.ServingStatus
    for address in (own, f"unix:{sockets}/scheduler"):
        assert health(address, "liveness") == serving.SERVING
        assert health(address, "readiness") == serving.NOT_SERVING
    start("tests.kit.fakes.fake_worker")
    service.wait_for_log(r" ready epoch=1")
    with grpc.insecure_channel(own) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for response in stub.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=20):
            if response.status == serving.SERVING:
                break
    assert health(f"unix:{sockets}/scheduler", "") == serving.SERVING
    assert len(re.findall("no worker answers", service.log)) == 1


async def test_a_killed_worker_process_and_its_successor(start: Callable[..., Service], sockets: str) -> None:
    worker = start("tests.kit.fakes.fake_worker", "--step-seconds", "0.002")
    service = scheduler(start, sockets, "--debug-integrity")
    await asyncio.to_thread(service.wait_for_log, " ready epoch=1")
    async with TokenClient(f"unix:{sockets}/scheduler") as client:
        await client.wait_until_ready()
        stream = await client.add("r", list(range(50)), n=3, max_tokens=300)
        await client.wait_until(lambda: stream.token_ids[2])
        worker.process.kill()
        await asyncio.to_thread(worker.process.wait)
        start("tests.kit.fakes.fake_worker")
        assert await client.result(stream) == oracle(list(range(50)), 300, n=3)
        # Told to stop, it ends the gateway's stream itself and says why.
        stopping = asyncio.to_thread(service.stop)
        end = client.wait_for_end()
        code, error = await asyncio.gather(stopping, end)
    assert code == 0
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in (error.details() or "")
    assert re.search(r"totals steps=\d+ .*completion_tokens=\d+", service.log)


async def test_the_log_shows_what_the_steps_did(start: Callable[..., Service], sockets: str) -> None:
    start("tests.kit.fakes.fake_worker")
    pools = ["--num-device-blocks", "20", "--num-host-blocks", "40", "--block-size", "8", "--max-prefill-chunk", "16"]
    service = scheduler(start, sockets, *pools)
    await asyncio.to_thread(service.wait_for_log, " ready epoch=1")
    async with TokenClient(f"unix:{sockets}/scheduler") as client:
        await client.wait_until_ready()
        streams = [await client.add(f"r{number}", [7] * 40, n=3, max_tokens=40) for number in range(6)]
        for stream in streams:
            await client.result(stream)
    assert service.stop() == 0
    for name in ("new", "prefill_pieces", "prefix_hits", "forks", "copied", "swapped_out", "swapped_in", "finished"):
        assert re.search(rf" step epoch=1 .*\b{name}=[1-9]", service.log), name
    totals = service.log[service.log.rindex("totals") :]
    for name in ("preemptions", "swapped_out", "swapped_in", "copied", "prefill_pieces", "cached_tokens"):
        assert re.search(rf"\b{name}=[1-9]", totals), name


async def test_a_worker_that_runs_is_taken_over_by_the_next_scheduler(
    start: Callable[..., Service], sockets: str
) -> None:
    worker = start("tests.kit.fakes.fake_worker")
    for epoch in (1, 2):
        service = scheduler(start, sockets)
        await asyncio.to_thread(service.wait_for_log, f" ready epoch={epoch}")
        async with TokenClient(f"unix:{sockets}/scheduler") as client:
            await client.wait_until_ready()
            await client.result(await client.add("r", [1]))
        assert await asyncio.to_thread(service.stop) == 0
        assert ("the cache is ready" in service.log) == (epoch == 1)
    assert worker.process.poll() is None
    other = scheduler(start, sockets, "--block-size", "8")
    await asyncio.to_thread(other.wait_for_log, "another configuration")
    assert await asyncio.to_thread(worker.process.wait, 20) == 0
    start("tests.kit.fakes.fake_worker")
    await asyncio.to_thread(other.wait_for_log, " ready epoch=1")
