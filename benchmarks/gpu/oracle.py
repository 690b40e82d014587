"""Stage `oracle` of benchmarks/gpu_day.sh: any way of running gives the tokens of running alone, on the demo model.

On a GPU our kernels run, in invariant mode; a dry run has torch's ops. It fails where the backend promises the same
bits (`batch_invariant`) and does not keep that. One that promises nothing is counted: how many sequences are the same.
"""

from __future__ import annotations

import asyncio
import sys
import time

import torch

from benchmarks.gpu.stage import Stage, start
from kernels.select import KernelChoice
from tests.kit.oracles.device_oracle import WAYS, OracleWorker, differences, make_requests

KERNELS = KernelChoice(cpu="reference", gpu="triton", batch_invariant=True)


async def compare(stage: Stage) -> bool:
    """Runs all ways. Returns whether what was promised is true."""
    kept = True
    async with OracleWorker(
        stage.device.type, "", torch.float32 if stage.is_dry else torch.bfloat16, kernels=KERNELS
    ) as worker:
        specs = make_requests(worker.vocab_size, *((4, 8) if stage.is_dry else ()))
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
    sys.exit(0 if asyncio.run(compare(start(__doc__))) else 1)
