"""In how many starts the host's memory serves as the second tier of the prefix cache, and what that is worth.

    python benchmarks/host_cache.py [--model FOLDER] [--starts 50] [--seconds 6] [--write]

A start is a new system whose device pool holds half of the prompts and whose host pool holds all of them. The prompts
are asked one after another, round for round, so each finds the device without it. A start is judged by its last two
rounds: the share of their prompt tokens that came from the cache, the blocks that came back from the host for that, and
the seconds of a round, beside those of starts without a host pool. The model is so small that a block is computed in
about the time in which it is copied into memory that is taken from the system for it: where a measure of first copies
decides, it decides wrongly now and then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.kit import models, record
from benchmarks.kit.figures import number, round_figures, spread_of
from benchmarks.kit.ideal import Shape
from benchmarks.kit.whole_system import WholeSystem
from benchmarks.kit.worker_alone import BLOCK_SIZE, Settings
from benchmarks.kit.workload import Workload
from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = models.Recipe(128, 8, 4, 4, 256, 2048, tied=True, qkv_bias=False)
NUM_PROMPTS, NUM_PROMPT_BLOCKS = 60, 2
NUM_BLOCKS = NUM_PROMPTS * NUM_PROMPT_BLOCKS
NUM_ROUNDS = 2
SERVES = 0.1
"""The share of its last rounds' prompt tokens from which a start's host pool counts as one that serves."""


@dataclass(frozen=True, slots=True)
class Start:
    """The last two rounds of a start: seconds of one, the share of cached tokens, and blocks swapped in."""

    seconds: float
    cached_share: float
    num_swapped_in_blocks: int


async def measure_start(settings: Settings, num_host_blocks: int, warm_up_seconds: float) -> Start:
    """Starts a system, asks all prompts again and again for so long, then twice more, and stops it."""
    vocab_size = Shape.read(Path(settings.model)).vocab_size
    num_tokens = NUM_PROMPT_BLOCKS * BLOCK_SIZE
    # One request each; a seed is a prompt.
    prompts = [Workload(1, num_tokens + 1, 1, vocab_size, seed) for seed in range(NUM_PROMPTS)]
    async with WholeSystem(settings, num_host_blocks=num_host_blocks) as system:
        end = time.monotonic() + warm_up_seconds
        for prompt in itertools.cycle(prompts):
            await system.run(prompt)
            if prompt is prompts[-1] and time.monotonic() > end:
                break
        before = await _read_counts(system)
        seconds = sum([(await system.run(prompt)).seconds for prompt in prompts * NUM_ROUNDS])
        num_prompt, num_cached, num_swapped = (
            now - then for now, then in zip(await _read_counts(system), before, strict=True)
        )
    return Start(seconds / NUM_ROUNDS, num_cached / num_prompt, num_swapped)


async def _read_counts(system: WholeSystem) -> tuple[int, int, int]:
    """Asks for the tokens of prompts so far, those of them from the cache, and the blocks from the host."""
    async with grpc.aio.insecure_channel(system.admin_address) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        (replica,) = (await stub.GetStatus(admin_pb2.GetStatusRequest())).scheduler.replicas
    return replica.num_prompt_tokens, replica.num_cached_tokens, replica.num_swapped_in_blocks


def summarize(starts: Sequence[Start], without: Sequence[Start]) -> dict[str, Any]:
    """The starts in which the host served, and the spreads."""
    return {
        "num_starts": len(starts),
        "num_serving": sum(start.cached_share >= SERVES for start in starts),
        "cached_share": spread_of([start.cached_share for start in starts]),
        "num_swapped_in_blocks": spread_of([start.num_swapped_in_blocks for start in starts]),
        "round_seconds": spread_of([start.seconds for start in starts]),
        "round_seconds_without": spread_of([start.seconds for start in without]),
    }


def report(results: dict[str, Any]) -> str:
    """The results for a person."""
    seconds, without = (number(results[name], 3) for name in ("round_seconds", "round_seconds_without"))
    lines = [
        f"the host serves in {results['num_serving']} of {results['num_starts']} starts",
        f"cached share of prompt tokens: {number(results['cached_share'], 2)}",
        f"seconds of a round: {seconds}, without a host pool {without}",
    ]
    return "\n".join(lines)


def run(folder: Path, num_starts: int, seconds: float) -> dict[str, Any]:
    """Measures all starts; every tenth is followed by one without a host pool."""
    settings = Settings(str(folder), num_device_blocks=NUM_BLOCKS // 2, max_num_seqs=4, max_model_len=1024)
    starts: list[Start] = []
    without: list[Start] = []
    for number_of_start in range(num_starts):
        starts.append(asyncio.run(measure_start(settings, 2 * NUM_BLOCKS, seconds)))
        print(number_of_start, starts[-1], flush=True)
        if number_of_start % 10 == 0:
            without.append(asyncio.run(measure_start(settings, 0, seconds)))
    return {"model": folder.name, **summarize(starts, without)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder; default: one that is made for this")
    parser.add_argument("--starts", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long a start is asked before it is judged")
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/host_cache.json")
    return parser.parse_args(arguments)


def main() -> None:
    """Measures, prints, and writes with --write."""
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or models.write_model(MODEL, Path(folder) / "small")
        results = round_figures(run(model, options.starts, options.seconds))
    print(report(results))
    if options.write:
        record.append("host_cache", results)


if __name__ == "__main__":
    main()
