"""A worker's start, stage by stage: the process as `blockyard serve` starts it, and its scheduler's calls."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.kit.processes import cpu_seconds, memory_bytes
from blockyard.service.servers import internal_channel
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.kit.worker_alone import Settings

ROOT = Path(__file__).parents[2]
POLL_SECONDS = 0.005
MAX_START_SECONDS = 60.0
QUANTIZATIONS = {"": worker_pb2.QUANTIZATION_UNSPECIFIED, "int8": worker_pb2.QUANTIZATION_INT8}
DTYPES = {"bfloat16": worker_pb2.DTYPE_BFLOAT16, "float32": worker_pb2.DTYPE_FLOAT32}


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, and what the process holds at its end."""

    name: str
    seconds: float
    cpu_seconds: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """All stages of one start, until steps can be sent; and what the worker must hold."""

    stages: Sequence[Stage]
    weights_bytes: int
    kv_pool_bytes: int

    @property
    def seconds(self) -> float:
        """From the start of the process until steps can be sent."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def load_seconds(self) -> float:
        """Of the stage that loads the weights."""
        return next(stage.seconds for stage in self.stages if stage.name == LOAD)


LOAD = "load the weights"


class Clock:
    """Lists stages of a process, each from the end of the one before; the first from its start."""

    def __init__(self, pid: int) -> None:
        self.stages: list[Stage] = []
        self._pid = pid
        self._begin, self._cpu_seconds = time.perf_counter(), 0.0

    def end(self, name: str) -> None:
        """Ends a stage."""
        now, spent = time.perf_counter(), cpu_seconds(self._pid)
        self.stages.append(Stage(name, now - self._begin, spent - self._cpu_seconds, memory_bytes(self._pid)))
        self._begin, self._cpu_seconds = now, spent


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker's process that listens, and the way to it."""

    stub: Any
    clock: Clock


@asynccontextmanager
async def running_worker(flags: Sequence[str]) -> AsyncIterator[RunningWorker]:
    """Starts a worker, and kills it in the end. Raises TimeoutError where it does not start."""
    with tempfile.TemporaryDirectory(prefix="by") as folder:
        address = Path(folder) / "worker"
        flags = ["--worker-address", f"unix:{address}", "--log-level", "warning", *flags]
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "worker_service", *flags, cwd=ROOT)
        clock = Clock(process.pid)
        try:
            async with asyncio.timeout(MAX_START_SECONDS):
                while not address.exists():  # noqa: ASYNC110  another process makes it
                    await asyncio.sleep(POLL_SECONDS)
            async with internal_channel(f"unix:{address}") as channel:
                yield RunningWorker(worker_pb2_grpc.WorkerServiceStub(channel), clock)
        finally:
            process.kill()
            await process.wait()


async def measure(settings: Settings) -> WorkerStart:
    """Starts a worker, and ends it. Raises TimeoutError or grpc.aio.AioRpcError where it does not start."""
    flags = ["--cpu-kernels", settings.cpu_kernels, "--num-threads", str(settings.num_threads)]
    flags += ["--packed-cache", settings.packed_cache] if settings.packed_cache else []
    async with running_worker(flags) as worker:
        return await _set_up(worker.stub, settings, worker.clock)


async def _set_up(stub: Any, settings: Settings, clock: Clock) -> WorkerStart:
    device = worker_pb2.InitDeviceRequest(device_type=worker_pb2.DEVICE_TYPE_CPU, dtype=DTYPES[settings.dtype])
    await stub.InitDevice(device, wait_for_ready=True)
    clock.end("until it answers")
    load = worker_pb2.LoadModelRequest(model=settings.model, quantization=QUANTIZATIONS[settings.quantization])
    *_, last = [event async for event in stub.LoadModel(load)]
    clock.end(LOAD)
    step = {name: getattr(settings, name) for name in ("block_size", "max_num_batched_tokens", "max_num_seqs")}
    profile = worker_pb2.DetermineNumAvailableBlocksRequest(**step, device_memory_utilization=0.9)
    await stub.DetermineNumAvailableBlocks(profile)
    clock.end("count blocks")
    pools = {"num_device_blocks": settings.num_device_blocks, "max_model_len": settings.max_model_len}
    answer = await stub.InitializeCache(worker_pb2.InitializeCacheRequest(**step, **pools))
    clock.end("make the cache and warm up")
    kv_pool_bytes = settings.num_device_blocks * answer.cache.cache_block_bytes
    return WorkerStart(tuple(clock.stages), last.loaded.parameter_bytes, kv_pool_bytes)
