"""A worker's start, stage by stage, in a process of its own.

`python benchmarks/kit/worker_start.py SETTINGS` prints JSON.
It imports the standard library alone before its clock runs: what a worker imports are its first stages.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from benchmarks.kit.worker_alone import Settings


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage, and what the process holds at its end."""

    name: str
    seconds: float
    cpu_seconds: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """All stages of one start, and what the worker must hold."""

    stages: list[Stage]
    weights_bytes: int
    kv_pool_bytes: int


def measure(settings: Settings) -> WorkerStart:
    """Starts a worker in a process of its own. Raises CalledProcessError where it does not start."""
    command = [sys.executable, __file__, json.dumps(asdict(settings))]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    reported = json.loads(done.stdout)
    stages = [Stage(**stage) for stage in reported["stages"]]
    return WorkerStart(stages, reported["weights_bytes"], reported["kv_pool_bytes"])


# In the process.


class Clock:
    """Lists stages, each from the end of the one before."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._begin = (time.perf_counter(), time.process_time())

    def end(self, name: str) -> None:
        """Ends a stage."""
        seconds, cpu_seconds = time.perf_counter() - self._begin[0], time.process_time() - self._begin[1]
        num_pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.stages.append(Stage(name, seconds, cpu_seconds, num_pages * os.sysconf("SC_PAGE_SIZE")))
        self._begin = (time.perf_counter(), time.process_time())


async def start(given: dict[str, Any]) -> WorkerStart:
    """Brings a worker to where it takes steps, by the same calls as its servicer."""
    clock = Clock()
    import torch  # noqa: PLC0415  a stage

    clock.end("import torch")
    from benchmarks.kit.worker_alone import Settings  # noqa: PLC0415  a stage
    from blockyard.capacity.limits import ProfileRequest  # noqa: PLC0415
    from kernels.select import KernelChoice  # noqa: PLC0415
    from worker_service import server  # noqa: PLC0415
    from worker_service.set_up import CacheRequest, LoadOptions  # noqa: PLC0415

    clock.end("import the worker")
    settings = Settings(**given)
    cache = Path(settings.packed_cache) if settings.packed_cache else None
    options = LoadOptions(KernelChoice(cpu=settings.cpu_kernels), packed_cache=cache)
    worker = server.Worker(num_threads=settings.num_threads, load_options=options)
    worker.start()
    await worker.init_device("cpu", getattr(torch, settings.dtype), "")
    loaded = await worker.load_model(settings.model, "main", lambda done, total: None, settings.quantization or "none")
    clock.end("load the weights")
    sizes = (settings.max_num_batched_tokens, settings.max_num_seqs)
    await worker.determine_num_available_blocks(ProfileRequest(settings.block_size, 0.9, 0, *sizes))
    clock.end("count blocks")
    blocks = (settings.block_size, settings.num_device_blocks, 0)
    cache = await worker.initialize_cache(CacheRequest(*blocks, settings.max_model_len, *sizes))
    clock.end("make the cache and warm up")
    await worker.stop(5.0)
    return WorkerStart(clock.stages, loaded.parameter_bytes, settings.num_device_blocks * cache.cache_block_bytes)


def main() -> None:
    """The process's program: the settings as JSON are its only argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help="benchmarks.kit.worker_alone.Settings as JSON")
    # As worker_service/__main__.py has it.
    os.environ.setdefault("GOMP_SPINCOUNT", "500")
    print(json.dumps(asdict(asyncio.run(start(json.loads(parser.parse_args().settings))))))


if __name__ == "__main__":
    main()
