"""What LoRA adapters cost a decode: slots that no row uses, adapters for every row, and an adapter that is being read.

    python benchmarks/kernels/lora_cost.py [--model llama-1.1b] [--rows 8] [--rank 16] [--rounds 15] [--write]

Weights are random. Replays captured steps of the CPU kernels in this process, of one sequence a row, in turn: without
slots, with slots and no adapter in the step, with an adapter of its own for each row, and without adapters while the
loader's thread reads one again and again. Each figure is a ratio to the steps without slots of the same rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernels import ceilings
from benchmarks.kernels.phases import BLOCK_SIZE, CONTEXT, Workload
from benchmarks.kit import models, record
from benchmarks.kit.figures import round_figures
from blockyard.contract.workers import LoraLimits
from blockyard_kernels.capture import CaptureSizes
from blockyard_kernels.lora import LoraRows
from tests.kit.kernels.tiny_adapters import make_tiny_adapter
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.lora.adapter import LoraRequest
from worker_service.lora.reader import AdapterReader
from worker_service.lora.store import be_modest
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from blockyard_kernels.capture import CapturedStep, StepInputs

# As large as an adapter usually is: 50 MB, for a model of 1.1 B.
LOADED_RANK = 32


class Steps:
    """The captured steps of one model, and its adapters."""

    def __init__(self, recipe: str, home: Path, num_rows: int, rank: int, num_threads: int) -> None:
        self._folder = home / "model"
        self._folder.mkdir()
        models.write_configuration(models.RECIPES[recipe], self._folder)
        cpu = torch.device("cpu")
        loaded = load_model(self._folder, torch.bfloat16, cpu, lambda done, total: None, load_format="random")
        loaded.backend.set_num_threads(num_threads)
        loaded.model.reserve_positions(CONTEXT)
        pool = self._pool = allocate_pool(
            BlockFormat.of(loaded.model, BLOCK_SIZE), 1 + num_rows * -(-CONTEXT // BLOCK_SIZE), cpu
        )
        sizes = CaptureSizes(num_rows, num_rows, BLOCK_SIZE)
        self.kernels = loaded.backend.name
        assert loaded.backend.lora is not None
        without = loaded.model.capture(pool, sizes)
        limits = LoraLimits(num_rows, max(rank, LOADED_RANK), num_rows)
        self._reader = AdapterReader(loaded.model, loaded.backend.lora, limits)
        slotted = loaded.model.capture(pool, sizes)
        assert without is not None
        assert slotted is not None
        inputs = Workload(num_rows, 1, CONTEXT).inputs(loaded.config.vocab_size)
        adapted = replace(inputs, lora=LoraRows(np.arange(num_rows, dtype=np.int32)))
        for slot in range(num_rows):
            folder = make_tiny_adapter(home / str(slot), self._folder, slot, rank=rank)
            self._reader.write(slot, self._reader.read(LoraRequest(slot + 1, str(slot), ""), folder))
        self._large = make_tiny_adapter(home / "large", self._folder, 99, rank=LOADED_RANK)
        self.large_bytes = (self._large / "adapter_model.safetensors").stat().st_size // 2
        self.of: dict[str, tuple[CapturedStep, StepInputs]] = {
            "without slots": (without, inputs),
            "no row has an adapter": (slotted, inputs),
            "every row has an adapter": (slotted, adapted),
        }

    def read_again_and_again(self, stop: threading.Event) -> None:
        """Reads an adapter as the loader does."""
        be_modest()
        while not stop.is_set():
            self._reader.read(LoraRequest(1, "large", ""), self._large)


def seconds_of(step: CapturedStep, inputs: StepInputs) -> float:
    """Times one step."""
    begin = time.perf_counter()
    step.replay(inputs, with_logits=False)
    return time.perf_counter() - begin


def measure(steps: Steps, num_rounds: int) -> dict[str, Any]:
    """Times the steps in turn; ratios of medians."""
    seconds: dict[str, list[float]] = {name: [] for name in [*steps.of, "while an adapter is read"]}
    for name in steps.of:
        seconds_of(*steps.of[name])
    for _ in range(num_rounds):
        for name, (step, inputs) in steps.of.items():
            # The first of a kind finds the caches of another.
            seconds[name] += [seconds_of(step, inputs) for _ in range(4)][1:]
        stop = threading.Event()
        loader = threading.Thread(target=steps.read_again_and_again, args=(stop,))
        loader.start()
        step, inputs = steps.of["no row has an adapter"]
        seconds["while an adapter is read"] += [seconds_of(step, inputs) for _ in range(4)][1:]
        stop.set()
        loader.join()
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    base = medians["without slots"]
    return {
        name: {
            "milliseconds": 1e3 * median,
            "ratio": median / base,
            "ratio_of_the_least": min(seconds[name]) / min(seconds["without slots"]),
            "slowest_milliseconds": 1e3 * max(seconds[name]),
        }
        for name, median in medians.items()
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1.1b", choices=sorted(models.RECIPES))
    parser.add_argument("--rows", type=int, default=8, help="sequences of a step, each with an adapter of its own")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--num-threads", type=int, default=ceilings.usable_processors())
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/lora-cost.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        steps = Steps(options.model, Path(home), options.rows, options.rank, options.num_threads)
        results = round_figures(
            {
                "model": options.model,
                "rows": options.rows,
                "rank": options.rank,
                "num_threads": options.num_threads,
                "kernels": steps.kernels,
                "bytes_of_the_adapter_that_is_read": steps.large_bytes,
                "steps": measure(steps, options.rounds),
            }
        )
    print(f"{options.model}, {options.rows} rows, rank {options.rank}, {steps.kernels}")
    for name, figures in results["steps"].items():
        ratios = f"x {figures['ratio']:.3f}  least x {figures['ratio_of_the_least']:.3f}"
        print(f"  {name:28}{figures['milliseconds']:9.2f} ms  {ratios}")
    if options.write:
        record.append("lora-cost", results)


if __name__ == "__main__":
    main()
