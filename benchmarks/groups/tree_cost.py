"""What it costs one worker that products are summed over leaves, so that ranks can share them and change no bit.

    python benchmarks/groups/tree_cost.py [--models llama-135m llama-1.1b] [--rounds 9] [--write]

The same model is loaded twice, with its leaves and with one leaf in each product, and both compute the same captured
steps in turn: decodes of 1, 8, 32 and 64 sequences and a prompt of 1024 tokens. Ratios are of the steps' rates in the
same round, of the best of three repeats. Target: 0.98 in decodes.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import ceilings
from benchmarks.kernels.phases import CONTEXT, PROMPT_TOKENS, Profile, Workload
from benchmarks.kit import models, record
from benchmarks.kit.figures import number, round_figures, spread_of
from blockyard.model_config import parallel_sizes

SEQUENCES = (1, 8, 32, 64)
REPEATS = 3


def make_steps(sequences: tuple[int, ...] = SEQUENCES) -> dict[str, Workload]:
    """The steps, by what they are called."""
    decodes = {f"decode {count}": Workload(count, 1, CONTEXT) for count in sequences}
    return {**decodes, f"prompt of {PROMPT_TOKENS}": Workload(1, PROMPT_TOKENS, PROMPT_TOKENS)}


def measure(folder: Path, kind: str, num_rounds: int, steps: dict[str, Workload]) -> dict[str, Any]:
    """Compares a model's steps with and without leaves."""
    most = max(step.num_sequences for step in steps.values())
    num_threads = ceilings.usable_processors()
    with mock.patch.object(parallel_sizes, "count_leaves", lambda in_features, unit_features=1: 1):
        whole = Profile(folder, num_threads, most, kind)
    contestants = {"tree": Profile(folder, num_threads, most, kind), "whole": whole}
    found: dict[str, Any] = {}
    for name, step in steps.items():
        inputs = step.inputs(whole.shape.vocab_size)
        rates: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for turn in range(1 + num_rounds):
            order = list(contestants.items())
            for contestant, profile in order if turn % 2 else reversed(order):
                seconds: list[float] = []
                for _ in range(REPEATS):
                    begin = time.perf_counter()
                    profile.replay(inputs)
                    seconds.append(time.perf_counter() - begin)
                # The first round warms up.
                if turn:
                    rates[contestant].append(1 / min(seconds))
        found[name] = {
            "milliseconds": spread_of([1e3 / rate for rate in rates["tree"]]),
            "ratio": spread_of(rates["tree"], rates["whole"]),
        }
    return found


def main() -> None:
    """Measures, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", choices=models.RECIPES, nargs="+", default=["llama-135m", "llama-1.1b"])
    parser.add_argument("--kind", default="bfloat16", choices=["bfloat16", "float32", "int8"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/tree_cost.json")
    options = parser.parse_args()
    results = {
        name: measure(models.make_model(name), options.kind, options.rounds, make_steps()) for name in options.models
    }
    for name, steps in results.items():
        for step, each in steps.items():
            ratio, milliseconds = number(each["ratio"], 3), number(each["milliseconds"], 2)
            print(f"{name:12} {step:14} {ratio} of the rate without, {milliseconds} ms")
    if options.write:
        record.append("tree_cost", {"kind": options.kind, **round_figures(results)})


if __name__ == "__main__":
    main()
