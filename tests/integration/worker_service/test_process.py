"""The worker as a process: it listens, serves, and ends cleanly by signal or by rpc."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from blockyard.errors import Reason
from blockyard.service import roots
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2 as pb
from tests.kit.processes.system import Service
from tests.unit.worker_service.driver import WorkerDriver, fails, new_sequence

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from worker_service.server import Server

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def service(socket_folder: Path) -> AsyncIterator[Service]:
    """A worker process with one compute thread."""
    flags = ["--worker-address", f"unix:{socket_folder}/w", "--worker-device", "cpu", "--num-threads", "1"]
    service = Service("worker_service", [*flags, "--worker-health-port", "0"], socket_folder / "log")
    service.wait_for_log(r"listening worker_address=unix:\S+ health_port=\d+")
    yield service
    service.stop()


async def test_it_serves_and_ends_on_sigterm_with_an_open_stream(
    service: Service, socket_folder: Path, model: Path
) -> None:
    async with internal_channel(f"unix:{socket_folder}/w") as channel:
        worker = WorkerDriver(_nobody(), channel)
        await worker.prepare(model)
        steps = worker.open(1)
        new = new_sequence(1, [5, 6, 7], [1])
        assert await steps.sampled(new_sequences=[new], sequence_ids=[1], num_new_tokens=[3])
        service.process.send_signal(signal.SIGTERM)
        last = await steps.answer()
        assert (last.step_id, last.draining) == (1, True)
        assert (await steps.end_error()).reason is Reason.DRAINING
    assert service.process.wait(20) == 0
    assert "Traceback" not in service.log


async def test_an_exit_in_an_extension_ends_it_and_a_panic_does_not(socket_folder: Path, model: Path) -> None:
    extension = ["--worker-extension", "tests.kit.worker_extension:Example"]
    flags = [f"--worker-address=unix:{socket_folder}/w", "--worker-device=cpu", "--num-threads=1", *extension]
    service = Service("worker_service", [*flags, "--worker-health-port=-1"], socket_folder / "log")
    try:
        service.wait_for_log("listening")
        async with internal_channel(f"unix:{socket_folder}/w") as channel:
            worker = WorkerDriver(_nobody(), channel)
            await worker.prepare(model)
            panics, leaves, echoes = (
                pb.CallExtensionRequest(extension="example", operation=operation)
                for operation in ("panic", "leave", "echo")
            )
            error = await fails(worker.stub.CallExtension(panics))
            assert error.reason is Reason.EXTENSION_FAILED
            assert (await worker.stub.CallExtension(echoes)).result == b""
            # Whoever calls sees the connection go.
            assert (await fails(worker.stub.CallExtension(leaves))).code.name == "UNAVAILABLE"
        assert service.process.wait(20) == roots.EXIT_CODE
        assert service.log.count("a thread failed: the process ends name=device") == 1
    finally:
        service.stop()


async def test_it_ends_on_shutdown(service: Service, socket_folder: Path) -> None:
    async with internal_channel(f"unix:{socket_folder}/w") as channel:
        await WorkerDriver(_nobody(), channel).stub.Shutdown(pb.ShutdownRequest(reason="a test"))
    assert service.process.wait(20) == 0
    assert "shutdown requested" in service.log
    assert "Traceback" not in service.log


async def test_a_worker_that_was_killed_starts_again_at_its_address(service: Service, socket_folder: Path) -> None:
    service.process.kill()
    service.process.wait(20)
    again = Service("worker_service", ["--worker-address", f"unix:{socket_folder}/w"], socket_folder / "again")
    try:
        again.wait_for_log("listening")
        async with internal_channel(f"unix:{socket_folder}/w") as channel:
            assert (await WorkerDriver(_nobody(), channel).info()).incarnation
    finally:
        assert again.stop() == 0


# A worker whose profile computes for ever, as a load of minutes would, and that waits for it as long as it is told.
_ENDLESS = """
import functools
import sys
import torch
import worker_service.server as server
from blockyard.settings import load
from worker_service.config import WorkerConfiguration
from worker_service.set_up import Stages

def compute(loaded, choice, request, loras):
    while True:
        torch.ones(200, 200) @ torch.ones(200, 200)

server.STOP_SECONDS = float(sys.argv.pop())
server.Server = functools.partial(server.Server, stages=Stages(count_blocks=compute))
server.run(load(WorkerConfiguration, "worker", ""))
"""


@pytest.fixture(params=[0.1])
def endless(socket_folder: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    flags = ["--worker-address", f"unix:{socket_folder}/w", "--num-threads", "1", str(request.param)]
    with subprocess.Popen(
        [sys.executable, "-c", _ENDLESS, *flags], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@asynccontextmanager
async def computing(endless: subprocess.Popen[str], socket_folder: Path, model: Path) -> AsyncIterator[Any]:
    """Has it begin what does not end; gives the call."""
    assert endless.stderr is not None
    assert "listening" in endless.stderr.readline()
    async with internal_channel(f"unix:{socket_folder}/w") as channel:
        worker = WorkerDriver(_nobody(), channel)
        await worker.load(model)
        request = pb.DetermineNumAvailableBlocksRequest(
            device_memory_utilization=0.5, max_num_batched_tokens=1, max_num_seqs=1
        )
        call = worker.stub.DetermineNumAvailableBlocks(request)
        error = await fails(worker.stub.DetermineNumAvailableBlocks(request))
        assert "is running" in error.message
        yield call


async def test_work_that_does_not_end_is_given_up_and_the_process_ends_well(
    endless: subprocess.Popen[str], socket_folder: Path, model: Path
) -> None:
    async with computing(endless, socket_folder, model) as call:
        endless.send_signal(signal.SIGTERM)
        assert (await fails(call)).code is grpc.StatusCode.UNAVAILABLE
    assert endless.stderr is not None
    told = endless.stderr.read()
    assert endless.wait(20) == 0, told
    assert "gave up waiting for running work" in told
    assert "terminate" not in told


@pytest.mark.parametrize("endless", [1000], indirect=True)
async def test_a_second_signal_ends_it_at_once(
    endless: subprocess.Popen[str], socket_folder: Path, model: Path
) -> None:
    async with computing(endless, socket_folder, model) as call:
        endless.send_signal(signal.SIGTERM)
        assert endless.stderr is not None
        while "stopping" not in await asyncio.to_thread(endless.stderr.readline):
            assert endless.poll() is None
        endless.send_signal(signal.SIGTERM)
        assert (await fails(call)).code is grpc.StatusCode.UNAVAILABLE
    assert endless.wait(20) == -signal.SIGTERM


# A worker whose adapters lie in a file system that never answers.
_HANGING = """
import threading
import worker_service.lora.store
import worker_service.server as server
from blockyard.settings import load
from worker_service.config import WorkerConfiguration

def hang(*arguments):
    print("hanging", flush=True)
    threading.Event().wait()

server.STOP_SECONDS = server.END_SECONDS = 0.5
worker_service.lora.store.find_below = hang
server.run(load(WorkerConfiguration, "worker", ""))
"""


@pytest.fixture
def hanging(socket_folder: Path) -> Iterator[subprocess.Popen[str]]:
    flags = ["--worker-address", f"unix:{socket_folder}/w", "--worker-lora-root", str(socket_folder)]
    command = [sys.executable, "-c", _HANGING, *flags, "--num-threads", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_a_load_of_an_adapter_that_hangs_does_not_keep_the_process(
    hanging: subprocess.Popen[str], socket_folder: Path, model: Path
) -> None:
    assert hanging.stderr is not None
    assert hanging.stdout is not None
    assert "listening" in hanging.stderr.readline()
    async with internal_channel(f"unix:{socket_folder}/w") as channel:
        stub = WorkerDriver(_nobody(), channel).stub
        await stub.InitDevice(pb.InitDeviceRequest(device_type=pb.DEVICE_TYPE_CPU, dtype=pb.DTYPE_FLOAT32))
        limits = pb.LoraLimits(max_loras=1, max_lora_rank=8, max_cpu_loras=1)
        async for _ in stub.LoadModel(pb.LoadModelRequest(model=str(model), lora=limits)):
            pass
        loading = asyncio.ensure_future(fails(stub.AddLora(pb.AddLoraRequest(lora_id=1, name="a", path="a"))))
        assert await asyncio.to_thread(hanging.stdout.readline) == "hanging\n"
        hanging.send_signal(signal.SIGTERM)
        assert (await loading).code is grpc.StatusCode.UNAVAILABLE
    assert hanging.wait(20) == 0


def test_a_taken_port_is_an_error() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "worker_service", "--worker-address", address],
            cwd=ROOT, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"cannot listen on {address}" in done.stderr
    assert "Traceback" not in done.stderr


def _nobody() -> Server:
    """The driver of another process has no server of its own to look into."""
    return None  # type: ignore[return-value]
