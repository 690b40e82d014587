"""What a replica of two workers does on one machine, beside a single worker that has all of its processors.

    python benchmarks/groups/rank_speed.py [--model llama-1.1b] [--concurrency 1 8 32] [--rounds 3] [--write]

The same requests go to systems as `blockyard serve` starts them: one worker with all threads, two workers that share
every layer, and two that have half of the layers each, with half of the threads each. They take turns within a round,
and stand beside each other as ratios to the first in the same round. On processors that share their memory two workers
bring nothing but the cost of their exchange, or, in stages, of steps that wait for one another: that cost is what is
measured here, and what each worker holds of the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import models, record
from benchmarks.kit.figures import number, round_figures, spread_of
from benchmarks.kit.ideal import Shape
from benchmarks.kit.whole_system import WholeSystem
from benchmarks.kit.worker_alone import Settings
from benchmarks.kit.workload import FreshWorkloads

# The flags of `blockyard serve` for each way to use the machine.
WAYS = {"1 worker": {}, "TP 2": {"tensor_parallel_size": 2}, "PP 2": {"pipeline_parallel_size": 2}}
ALONE = "1 worker"
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 32, 64
NUM_BLOCKS = 1024


def settings_for(folder: Path, dtype: str) -> Settings:
    """A pool that never runs out."""
    return Settings(model=str(folder), dtype=dtype, num_device_blocks=NUM_BLOCKS)


async def measure(folder: Path, dtype: str, concurrency: list[int], num_rounds: int) -> dict[str, Any]:
    """Runs batches of each size on each system in turn, and compares tokens a second within rounds."""
    rates = {size: {way: list[float]() for way in WAYS} for size in concurrency}
    workloads = FreshWorkloads(Shape.read(folder).vocab_size)
    batches = {size: workloads.of(size, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS) for size in concurrency}
    async with AsyncExitStack() as stack:
        systems = {
            way: await stack.enter_async_context(WholeSystem(settings_for(folder, dtype), **flags))
            for way, flags in WAYS.items()
        }
        for round_number in range(1 + num_rounds):
            for size, of_ways in rates.items():
                for way, system in systems.items():
                    batch = next(batches[size])
                    run = await system.run(batch)
                    # The first round warms up.
                    if round_number:
                        of_ways[way].append(batch.num_tokens / run.seconds)
        shares = {way: await system.weights_bytes() for way, system in systems.items()}
    speed = [
        {
            "num_requests": size,
            "tokens_per_second": {way: spread_of(of_ways[way]) for way in WAYS},
            "ratio": {way: spread_of(of_ways[way], of_ways[ALONE]) for way in WAYS if way != ALONE},
        }
        for size, of_ways in rates.items()
    ]
    return {"speed": speed, "weights_bytes": shares}


def report(result: dict[str, Any]) -> None:
    """Prints a result."""
    for each in result["speed"]:
        rates = (f"{way} {number(rate)}" for way, rate in each["tokens_per_second"].items())
        print(f"{each['num_requests']:>3} requests: {', '.join(rates)} tokens/s")
        print(f"{'':>14}", ", ".join(f"{way} {number(ratio, 2)}" for way, ratio in each["ratio"].items()))
    whole = sum(result["weights_bytes"][ALONE])
    for way, shares in result["weights_bytes"].items():
        print(f"{way}: {', '.join(f'{share / whole:.3f}' for share in shares)} of {whole / 1e6:.0f} MB")


def main() -> None:
    """Measures, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=models.RECIPES, default="llama-1.1b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/rank_speed.json")
    options = parser.parse_args()
    folder = models.make_model(options.model)
    result = asyncio.run(measure(folder, options.dtype, options.concurrency, options.rounds))
    report(result)
    if options.write:
        record.append("rank_speed", {"model": options.model, "dtype": options.dtype, **round_figures(result)})


if __name__ == "__main__":
    main()
