"""How long a start takes and what a worker holds: the whole system to its first token, and a worker stage by stage.

    python benchmarks/start.py [--model qwen2-0.5b] [--rounds 5] [--cold] [--write]

A round starts the whole system anew and asks it for a token, then workers by themselves: one that reads and packs the
model's files, and one that reads packed weights (`--packed-cache`). The files are in the system's cache by then; with
--cold a worker of each kind is started too while the weights' files are not. What `dd` takes for the packed file stands
beside. The last system also fills its KV pool, made for 64 requests of 256 tokens: its worker's peak may be 1.25 times
the weights and the pool, and 300 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import models, record, worker_start
from benchmarks.kit.figures import number, round_figures, spread_of
from benchmarks.kit.ideal import Shape
from benchmarks.kit.whole_system import SERVICES, WholeSystem
from benchmarks.kit.worker_alone import BLOCK_SIZE, Settings
from benchmarks.kit.worker_start import WorkerStart
from benchmarks.kit.workload import Workload
from benchmarks.throughput import MEMORY_BYTES, MEMORY_FACTOR

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_REQUESTS, NUM_TOKENS = 64, 256
WAYS = ("files", "packed")


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


@dataclass(slots=True)
class Starts:
    """The starts of workers in one way, and what `dd` took for the file that packed weights are read from."""

    workers: list[WorkerStart] = field(default_factory=list[WorkerStart])
    dd_seconds: list[float] = field(default_factory=list[float])


def forget(folder: Path) -> None:
    """Drops a folder's large files from the system's cache, as far as no process has them mapped."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.packed")):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_by_dd(path: Path) -> float:
    """Measures the seconds that dd takes to read a file."""
    begin = time.perf_counter()
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=1M", "status=none"], check=True)
    return time.perf_counter() - begin


def start_workers(settings: Settings, cache: Path, starts: dict[str, Starts], *, is_cold: bool) -> None:
    """Starts a worker in each way; a way's name tells which."""
    (pack,) = cache.glob("*.packed")
    for way in WAYS:
        packed_cache = str(cache) if way == "packed" else ""
        found = starts.setdefault(f"{way}, cold" if is_cold else way, Starts())
        for source in (Path(settings.model), cache) if is_cold else ():
            forget(source)
        found.workers.append(asyncio.run(worker_start.measure(replace(settings, packed_cache=packed_cache))))
        if is_cold:
            forget(cache)
        found.dd_seconds.append(read_by_dd(pack))


def summarize(systems: Sequence[dict[str, float]], starts: dict[str, Starts]) -> dict[str, Any]:
    """The spread of all that was measured, the highest peak, and the most that it may be."""
    workers = starts["files"].workers
    held = workers[0].weights_bytes + workers[0].kv_pool_bytes
    return {
        "first_token_seconds": spread_of([facts["first_token_seconds"] for facts in systems]),
        "cpu_seconds": {name: spread_of([facts[name] for facts in systems]) for name in SERVICES},
        "peak_bytes": max(facts["peak_bytes"] for facts in systems),
        "limit_bytes": MEMORY_FACTOR * held + MEMORY_BYTES,
        "weights_bytes": workers[0].weights_bytes,
        "kv_pool_bytes": workers[0].kv_pool_bytes,
        "workers": {way: summarize_way(found) for way, found in starts.items()},
        "packed_per_files": {
            way: spread_of(
                [start.seconds for start in found.workers],
                [start.seconds for start in starts[way.replace("packed", "files")].workers],
            )
            for way, found in starts.items()
            if way.startswith("packed")
        },
    }


def summarize_way(starts: Starts) -> dict[str, Any]:
    """The spread of the starts of workers in one way."""
    loads = [start.load_seconds for start in starts.workers]
    return {
        "seconds": spread_of([start.seconds for start in starts.workers]),
        "load_per_dd": spread_of(loads, starts.dd_seconds),
        "dd_seconds": spread_of(starts.dd_seconds),
        "stages": {
            stages[0].name: {
                "seconds": spread_of([stage.seconds for stage in stages]),
                "cpu_seconds": spread_of([stage.cpu_seconds for stage in stages]),
                "resident_bytes": max(stage.resident_bytes for stage in stages),
            }
            for stages in zip(*(worker.stages for worker in starts.workers), strict=True)
        },
    }


def report(results: dict[str, Any]) -> str:
    """The results for a person: of times the least, since whatever else ran made the others longer."""
    cpu = ", ".join(f"{name} {spread['min']:.2f}" for name, spread in results["cpu_seconds"].items())
    lines = [
        f"start to first token: {results['first_token_seconds']['min']:.2f} s (CPU: {cpu})",
        f"the worker's peak: {results['peak_bytes'] / 1e6:.0f} MB, of at most {results['limit_bytes'] / 1e6:.0f}",
    ]
    for way, found in results["workers"].items():
        lines.append(f"{'a worker by itself: ' + way:36}{'seconds':>9}{'CPU':>8}{'MB held':>9}")
        for name, stage in found["stages"].items():
            times = f"{stage['seconds']['min']:9.2f}{stage['cpu_seconds']['min']:8.2f}"
            lines.append(f"    {name:32}{times}{stage['resident_bytes'] / 1e6:9.0f}")
        load = found["stages"][worker_start.LOAD]["seconds"]["min"] / found["dd_seconds"]["min"]
        lines.append(f"    {'all of it':32}{found['seconds']['min']:9.2f}    its load is {load:.2f} x dd")
    for way, ratio in results["packed_per_files"].items():
        lines.append(f"{way} / {way.replace('packed', 'files')}: {number(ratio, 2)}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all rounds."""
    settings = settings_for(options)
    systems: list[dict[str, float]] = []
    starts: dict[str, Starts] = {}
    with tempfile.TemporaryDirectory(dir=Path(options.folder).parent, prefix=".packed-") as folder:
        # The first one writes the packed weights.
        asyncio.run(worker_start.measure(replace(settings, packed_cache=folder)))
        for number_of_round in range(options.rounds):
            is_last = number_of_round == options.rounds - 1
            systems.append(asyncio.run(start_system(settings, fills_pool=is_last)))
            for is_cold in (False, True) if options.cold else (False,):
                start_workers(settings, Path(folder), starts, is_cold=is_cold)
    return {"settings": {**asdict(settings), "model": Path(options.folder).name}, **summarize(systems, starts)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `folder` is the model's, made if it is one of benchmarks/kit/models.py."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2-0.5b", help="a name of benchmarks/kit/models.py, or a folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quantization", choices=("int8",), default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="start workers without the weights' files in memory too")
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
