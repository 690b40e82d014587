"""Stage `oracle` of benchmarks/gpu_day.sh: any way of running gives the tokens of running alone, on the demo model.

Most requests have an adapter. On a GPU our kernels run, in invariant mode; a dry run has torch's ops. It fails where
the backend promises the same bits (`batch_invariant`) and does not keep that. One that promises nothing is counted: how
many sequences are the same.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu.stage import Stage, start
from blockyard.model_files import resolve_model
from blockyard_kernels.select import KernelChoice
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from tests.kit.oracles.device_oracle import WAYS, OracleWorker, differences, make_requests

KERNELS = KernelChoice(cpu="reference", gpu="triton", batch_invariant=True)


async def compare(stage: Stage, folder: Path) -> bool:
    """Runs all ways; adapters go into a folder. Returns whether what was promised is true."""
    kept = True
    model, dtype = resolve_model("", "main", "config"), torch.float32 if stage.is_dry else torch.bfloat16
    adapters = [make_tiny_adapter(folder / name, model, seed) for seed, name in enumerate("abc")]
    async with OracleWorker(stage.device.type, "", dtype, kernels=KERNELS, adapters=adapters) as worker:
        specs = make_requests(worker.vocab_size, *((4, 8) if stage.is_dry else (12, 24)), worker.loras)
        stage.keep("batch_invariant", worker.is_batch_invariant)
        truth = await worker.run_alone(specs)
        for way in WAYS:
            begin = time.perf_counter()
            run = await worker.run(specs, way)
            wrong = differences(run.answers, truth)
            kept = kept and not (wrong and worker.is_batch_invariant)
            stage.keep(
                way.name,
                {
                    "seconds": time.perf_counter() - begin,
                    "num_sequences": sum(map(len, truth.values())),
                    "num_different": len(wrong),
                    "differences": wrong[:8],
                    "num_steps": run.num_steps,
                    "num_preemptions": run.num_preemptions,
                    "num_kills": run.num_kills,
                },
            )
    return kept


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        sys.exit(0 if asyncio.run(compare(start(__doc__), Path(home))) else 1)
