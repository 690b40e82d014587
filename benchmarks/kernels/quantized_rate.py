"""How fast steps are with weights as checkpoints have them quantized, beside those that we quantize, and bfloat16.

    python benchmarks/kernels/quantized_rate.py [--model qwen2-0.5b] [--concurrency 1 64] [--rounds 15] [--write]

Replays a captured step of decodes of the CPU kernels in this process. Weights are random, of each format's shapes; all
variants take turns in each round, and times are medians. Ratios of a run are worth more than its times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels.phases import BLOCK_SIZE, CONTEXT, Workload
from benchmarks.kit import models, record
from benchmarks.kit.figures import round_figures
from blockyard_kernels.capture import CaptureSizes
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.models.loader import load_model

if TYPE_CHECKING:
    from blockyard_kernels.capture import StepInputs

_CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_W8A8 = {"targets": ["Linear"], "weights": _CHANNELS, "input_activations": _TOKENS}
_GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": True}
VARIANTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "bfloat16": ("none", None),
    "--quantization int8": ("int8", None),
    "W8A8": (
        "none",
        {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"0": _W8A8}}
        | {"ignore": ["lm_head"]},
    ),
    "W4A16, groups of 128": ("none", {**_GPTQ, "group_size": 128}),
    "W4A16, groups of 32": ("none", {**_GPTQ, "group_size": 32}),
    "W4A16, groups of 128, --quantization int8": ("int8", {**_GPTQ, "group_size": 128}),
    "W4A16, groups of 32, --quantization int8": ("int8", {**_GPTQ, "group_size": 32}),
}
"""`--quantization`, and the `quantization_config` of the checkpoint."""


class Variant:
    """A model whose step is captured."""

    def __init__(self, folder: Path, quantization: str, num_threads: int, max_sequences: int) -> None:
        cpu = torch.device("cpu")
        loaded = load_model(
            folder, torch.bfloat16, cpu, lambda done, total: None, "auto", quantization, load_format="random"
        )
        loaded.backend.set_num_threads(num_threads)
        loaded.model.reserve_positions(CONTEXT)
        self.loaded = loaded
        # The plan has its address, and does not hold it.
        self._pool = allocate_pool(
            BlockFormat.of(loaded.model, BLOCK_SIZE), 1 + max_sequences * -(-CONTEXT // BLOCK_SIZE), cpu
        )
        self._plan = loaded.model.capture(self._pool, CaptureSizes(max_sequences, max_sequences, BLOCK_SIZE, None))

    def seconds(self, inputs: StepInputs) -> float:
        """Computes a step, and returns how long it took."""
        assert self._plan is not None
        begin = time.perf_counter()
        self._plan.replay(inputs, with_logits=False)
        return time.perf_counter() - begin


def measure(name: str, concurrency: list[int], num_rounds: int, num_threads: int) -> dict[str, Any]:
    """Measures all variants of a model."""
    configuration = models.configuration(models.RECIPES[name])
    variants = dict[str, Variant]()
    for variant, (quantization, stored) in VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            fields = configuration if stored is None else {**configuration, "quantization_config": stored}
            (Path(folder) / "config.json").write_text(json.dumps(fields))
            variants[variant] = Variant(Path(folder), quantization, num_threads, max(concurrency))
    rates = dict[str, dict[str, Any]]()
    for count in concurrency:
        inputs = Workload(count, 1, CONTEXT).inputs(configuration["vocab_size"])
        times: dict[str, list[float]] = {variant: [] for variant in variants}
        for _ in range(num_rounds + 1):
            for variant, each in variants.items():
                times[variant].append(each.seconds(inputs))
        # The first one warms up.
        tokens = {variant: count / statistics.median(spent[1:]) for variant, spent in times.items()}
        rates[str(count)] = {
            "tokens_per_second": tokens,
            "against W8A8": {variant: rate / tokens["W8A8"] for variant, rate in tokens.items()},
            "against --quantization int8": {
                variant: rate / tokens["--quantization int8"] for variant, rate in tokens.items()
            },
        }
    return {
        "model": name,
        "num_threads": num_threads,
        "context": CONTEXT,
        "weights_bytes": {variant: each.loaded.parameter_bytes for variant, each in variants.items()},
        "requests": rates,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2-0.5b", choices=models.RECIPES)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 64], help="requests of a step")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", action="store_true", help="keep this run in results/")
    options = parser.parse_args()
    results = round_figures(measure(options.model, options.concurrency, options.rounds, options.threads))
    print(json.dumps(results, indent=2))
    if options.write:
        record.append("quantized_rate", results)


if __name__ == "__main__":
    main()
