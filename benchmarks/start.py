"""How long a start takes and what a worker holds: the whole system to its first token, and a worker stage by stage.

    python benchmarks/start.py [--model qwen2-0.5b] [--rounds 5] [--write]

A round starts the whole system anew and asks it for a token, then a worker by itself. The model's file is in the
system's cache by then. The last system also fills its KV pool, made for 64 requests of 256 tokens: its worker's peak
may be 1.25 times the weights and the pool, and 300 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import models, record, worker_start
from benchmarks.kit.figures import round_figures, spread_of
from benchmarks.kit.ideal import Shape
from benchmarks.kit.whole_system import SERVICES, WholeSystem
from benchmarks.kit.worker_alone import BLOCK_SIZE, Settings
from benchmarks.kit.workload import Workload
from benchmarks.throughput import MEMORY_BYTES, MEMORY_FACTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.kit.worker_start import WorkerStart

NUM_REQUESTS, NUM_TOKENS = 64, 256


def settings_for(options: argparse.Namespace) -> Settings:
    """A pool that the requests fill, but for block 0 and what an admission leaves free for each."""
    num_blocks = NUM_REQUESTS * (NUM_TOKENS // BLOCK_SIZE + 2) + 1
    return Settings(
        model=options.folder,
        dtype=options.dtype,
        quantization=options.quantization,
        num_device_blocks=num_blocks,
        max_num_seqs=NUM_REQUESTS,
    )


async def start_system(settings: Settings, *, fills_pool: bool) -> dict[str, float]:
    """Measures seconds to the first token, CPU seconds of each process until then, and the worker's peak in the end."""
    async with WholeSystem(settings) as system:
        spent = system.cpu_seconds()
        facts = {"first_token_seconds": system.first_token_seconds, **{name: spent[name] for name in SERVICES}}
        if fills_pool:
            # Prompts write as much KV as answers, sooner.
            vocab_size = Shape.read(Path(settings.model)).vocab_size
            await system.run(Workload(NUM_REQUESTS, NUM_TOKENS - 1, 1, vocab_size))
        return {**facts, "peak_bytes": system.peak_memory_bytes()}


def summarize(systems: Sequence[dict[str, float]], workers: Sequence[WorkerStart]) -> dict[str, Any]:
    """The spread of all that was measured, the highest peak, and the most that it may be."""
    held = workers[0].weights_bytes + workers[0].kv_pool_bytes
    return {
        "first_token_seconds": spread_of([facts["first_token_seconds"] for facts in systems]),
        "cpu_seconds": {name: spread_of([facts[name] for facts in systems]) for name in SERVICES},
        "peak_bytes": max(facts["peak_bytes"] for facts in systems),
        "limit_bytes": MEMORY_FACTOR * held + MEMORY_BYTES,
        "weights_bytes": workers[0].weights_bytes,
        "kv_pool_bytes": workers[0].kv_pool_bytes,
        "stages": {
            stages[0].name: {
                "seconds": spread_of([stage.seconds for stage in stages]),
                "cpu_seconds": spread_of([stage.cpu_seconds for stage in stages]),
                "resident_bytes": max(stage.resident_bytes for stage in stages),
            }
            for stages in zip(*(worker.stages for worker in workers), strict=True)
        },
    }


def report(results: dict[str, Any]) -> str:
    """The results for a person: of times the least, since whatever else ran made the others longer."""
    cpu = ", ".join(f"{name} {spread['min']:.2f}" for name, spread in results["cpu_seconds"].items())
    lines = [
        f"start to first token: {results['first_token_seconds']['min']:.2f} s (CPU: {cpu})",
        f"the worker's peak: {results['peak_bytes'] / 1e6:.0f} MB, of at most {results['limit_bytes'] / 1e6:.0f}",
        f"{'a worker by itself':28}{'seconds':>9}{'CPU':>8}{'MB held':>9}",
    ]
    for name, stage in results["stages"].items():
        times = f"{stage['seconds']['min']:9.2f}{stage['cpu_seconds']['min']:8.2f}"
        lines.append(f"{name:28}{times}{stage['resident_bytes'] / 1e6:9.0f}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all rounds."""
    settings = settings_for(options)
    systems: list[dict[str, float]] = []
    workers: list[WorkerStart] = []
    for number in range(options.rounds):
        systems.append(asyncio.run(start_system(settings, fills_pool=number == options.rounds - 1)))
        workers.append(worker_start.measure(settings))
    return {"settings": {**asdict(settings), "model": Path(options.folder).name}, **summarize(systems, workers)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `folder` is the model's, made if it is one of benchmarks/kit/models.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2-0.5b", help="a name of benchmarks/kit/models.py, or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8",), default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/start-MODEL.json")
    options = parser.parse_args(arguments)
    named = options.model in models.RECIPES
    options.folder = str(models.make_model(options.model) if named else Path(options.model).resolve())
    return options


def main() -> None:
    """Measures, prints, and writes with --write."""
    options = parse()
    results = round_figures(run(options))
    print(report(results))
    if options.write:
        record.append(f"start-{results['settings']['model']}", results)


if __name__ == "__main__":
    main()
