"""What `blockyard plan` tells beside what workers find: blocks of each shape, size, quantization and kind of kernels.

    python benchmarks/plan.py [--models llama-135m qwen2-0.5b llama-1.1b] [--tensor 1 2] [--load-format auto] [--write]

The ranks of a replica are started one by one and load their share, as on one machine; each then counts its blocks. A
rank is told of half of the memory where there are two. `--utilization`, the share of the memory that all of them may
have, is small, so that what is not counted shows.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import models, record
from benchmarks.kit.figures import round_figures
from benchmarks.kit.worker_start import QUANTIZATIONS, running_worker
from blockyard.capacity.replica_plan import plan_replica
from blockyard.configuration import SystemConfiguration
from blockyard.contract.parallel import ParallelSizes
from blockyard.local.hardware import read_processors
from blockyard.model_config.network import read_network
from blockyard.model_config.parallel_sizes import legal_tensor_sizes
from blockyard.settings import resolve
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

STEP = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
FORMATS = {"auto": worker_pb2.LOAD_FORMAT_AUTO, "random": worker_pb2.LOAD_FORMAT_RANDOM}


@dataclass(frozen=True, slots=True)
class Case:
    """What is planned and started."""

    model: str
    tensor_parallel_size: int
    quantization: str
    cpu_kernels: str


def plan(case: Case, folder: Path, utilization: float) -> int:
    """Returns the number of blocks that is planned; raises SystemExit where the plan refuses."""
    values = {**STEP, "cpu_kernels": case.cpu_kernels, "device_memory_utilization": utilization, "device": "cpu"}
    values |= {"tensor_parallel_size": case.tensor_parallel_size, "swap_space_gib": 0.0}
    values |= {"quantization": case.quantization} if case.quantization else {}
    configuration = resolve(SystemConfiguration, values, environment={})
    sizes = ParallelSizes(case.tensor_parallel_size, 1)
    planned = plan_replica(read_network(folder), configuration, read_processors(), sizes)
    if planned.refusal:
        raise SystemExit(f"{case}: {planned.refusal}")
    return planned.tightest.num_device_blocks


async def find(case: Case, folder: Path, utilization: float, load_format: str) -> int:
    """Returns the number of blocks that the rank with the fewest finds."""
    size = case.tensor_parallel_size
    flags = ["--cpu-kernels", case.cpu_kernels]
    async with AsyncExitStack() as stack:
        stubs = [(await stack.enter_async_context(running_worker(flags))).stub for _ in range(size)]
        for rank, stub in enumerate(stubs):
            parallel = worker_pb2.Parallel(tensor_parallel_size=size, pipeline_parallel_size=1, rank=rank)
            device_type = worker_pb2.DEVICE_TYPE_CPU
            await stub.InitDevice(worker_pb2.InitDeviceRequest(device_type=device_type, parallel=parallel))
            load = worker_pb2.LoadModelRequest(
                model=str(folder), quantization=QUANTIZATIONS[case.quantization], format=FORMATS[load_format]
            )
            async for _ in stub.LoadModel(load):
                pass
        request = worker_pb2.DetermineNumAvailableBlocksRequest(**STEP, device_memory_utilization=utilization / size)
        return min([(await stub.DetermineNumAvailableBlocks(request)).num_device_blocks for stub in stubs])


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all cases, and prints each."""
    rows: list[dict[str, Any]] = []
    kinds = [("", "auto"), ("int8", "auto"), ("", "reference")]
    for name, size, kind in itertools.product(options.models, options.tensor, kinds):
        folder = models.make_model(name)
        if size not in legal_tensor_sizes(read_network(folder)):
            continue
        case = Case(name, size, *kind)
        planned = plan(case, folder, options.utilization)
        found = asyncio.run(find(case, folder, options.utilization, options.load_format))
        rows.append({**asdict(case), "planned": planned, "found": found, "ratio": planned / found})
        print(f"{name:12} TP {size} {kind[0] or 'bfloat16':9}{kind[1]:10}{planned:8}{found:8}{planned / found:8.3f}")
    settings = {"utilization": options.utilization, "load_format": options.load_format, **STEP}
    ratios = [row["ratio"] for row in rows]
    return {"settings": settings, "cases": rows, "least_ratio": min(ratios), "greatest_ratio": max(ratios)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(models.RECIPES), default=list(models.RECIPES))
    parser.add_argument("--tensor", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--utilization", type=float, default=0.2)
    parser.add_argument("--load-format", choices=tuple(FORMATS), default="auto")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/plan.json")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints, and writes with --write."""
    options = parse()
    results = round_figures(run(options))
    print(f"planned / found: {results['least_ratio']} to {results['greatest_ratio']}")
    if options.write:
        record.append("plan", results)


if __name__ == "__main__":
    main()
