"""Any way of running gives the tokens of running alone: kernels for GPUs in Triton's interpreter, in invariant mode.

`python -m tests.kit.oracles.interpreted_oracle`. A whole worker with a tiny model and adapters, whose steps are graphs
and launched ahead, on a device as late as it may be. Takes some ten minutes. Exit status 1 where a token differs.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import argparse
import asyncio
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from blockyard_kernels.cuda.backend import CudaBackend
from tests.kit.kernels.late import make_late
from tests.kit.kernels.strict_graphs import StrictRecording
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.kernels.tiny_models import tiny_model
from tests.kit.kernels.triton_interpreter import DEVICE
from tests.kit.oracles.device_oracle import WAYS, OracleWorker, differences, make_requests
from worker_service.models import loader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from scheduler_service.core.values import GroupSpec
    from tests.kit.oracles.device_oracle import Way


async def compare(
    make_specs: Callable[[OracleWorker], Sequence[GroupSpec]],
    folder: Path,
    depth: int = 2,
    names: str = "abc",
    ways: Sequence[Way] = WAYS,
) -> bool:
    """Runs all ways, and prints how each went. Returns whether nothing differs.

    Args:
        make_specs: returns the requests, of which some have adapters of the worker.
        folder: where the adapters go.
        depth: steps that may be launched.
        names: of the adapters, a letter each; there is a slot fewer.
        ways: how to run the requests.
    """
    backend = CudaBackend(DEVICE, invariant=True)
    backend.record = StrictRecording  # type: ignore[assignment]
    make_late(backend, depth)
    loader.get_backend = lambda *_, **__: backend
    is_equal, model = True, tiny_model("llama")
    adapters = [make_tiny_adapter(folder / name, model, seed, rank=3 + seed) for seed, name in enumerate(names)]
    async with OracleWorker("cpu", str(model), torch.float32, adapters=adapters, num_slots=len(adapters) - 1) as worker:
        assert worker.is_batch_invariant
        specs = make_specs(worker)
        truth = await worker.run_alone(specs)
        for way in ways:
            begin = time.perf_counter()
            run = await worker.run(specs, way)
            wrong = differences(run.answers, truth)
            is_equal = is_equal and not wrong
            counted = f"{run.num_steps} steps, {run.num_preemptions} preemptions, {run.num_swapped_blocks} swapped"
            told = f"{len(wrong)} of {len(truth)} differ, {counted}, {run.num_kills} kills"
            sys.stdout.write(f"{way.name}: {told}, {time.perf_counter() - begin:.0f} s\n")
            sys.stdout.flush()
    return is_equal


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", type=int, default=2, help="steps that may be launched")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer, at most")
    options = parser.parse_args()
    # Of what is no number in padding, which is nobody's.
    warnings.simplefilter("ignore", RuntimeWarning)

    def make_specs(worker: OracleWorker) -> list[GroupSpec]:
        return make_requests(worker.vocab_size, options.requests, options.tokens, worker.loras)

    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not asyncio.run(compare(make_specs, Path(folder), options.depth)))


if __name__ == "__main__":
    main()
