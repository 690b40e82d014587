"""Decoding by a mixture of experts beside a Llama, each against a read loop over the bytes that a step of it needs.

    python benchmarks/kernels/mixture_decode.py [--layers 12] [--rows 1] [--rounds 60] [--num-threads N] [--write]

Both are as wide and deep, of as many heads; the mixture's active experts have together as many inner features as the
Llama's MLP. Weights are random. Replays captured steps of the CPU kernels in this process, of one request or several,
of each in turn, with other tokens in each round, so that other experts are chosen. A step's bytes are those of all
weights that it multiplies by, of experts those that it chose. The share is what the read loop, measured before and
after, would take for them, over the step's median; the ratio of both shares does not depend on that loop.
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
from zlib import crc32

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernels import ceilings
from benchmarks.kernels.phases import BLOCK_SIZE, CONTEXT, Workload
from benchmarks.kit import record
from benchmarks.kit.figures import round_figures
from blockyard.contract.parallel import ALONE
from blockyard.model_config.share import Share
from blockyard_kernels.capture import CaptureSizes
from blockyard_kernels.select import get_backend, make_arena
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.models.builder import NetworkBuilder
from worker_service.models.mlp.mlp import MoE
from worker_service.models.model_config import ModelConfig, read_config
from worker_service.models.random_weights import RandomWeights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard_kernels.capture import CapturedStep
    from blockyard_kernels.ops import Backend

CPU = torch.device("cpu")
NUM_EXPERTS, TOP_K, INNER = 128, 8, 384
SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "intermediate_size": TOP_K * INNER},
    "mixture": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "intermediate_size": TOP_K * INNER,
        "moe_intermediate_size": INNER,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
    },
}


class QuickWeights(RandomWeights):
    """Random numbers, drawn once: each tensor begins at another of them."""

    _numbers = torch.randn(1 << 26, generator=torch.Generator().manual_seed(0)).bfloat16()

    def read(self, name: str, shape: Sequence[int]) -> Tensor:
        """Returns a tensor of which nobody may write."""
        if len(shape) == 1:
            return torch.ones(*shape, dtype=torch.bfloat16)
        size = int(np.prod(shape))
        begin = crc32(name.encode()) % (len(self._numbers) - size)
        return (self._numbers[begin : begin + size] * shape[-1] ** -0.5).view(*shape)


class Steps:
    """The captured step of one network, and what it reads."""

    def __init__(self, config: ModelConfig, backend: Backend, num_rows: int) -> None:
        weights = QuickWeights(config, CPU, lambda done, total: None)
        share = Share.of(config, ALONE)
        self._model = NetworkBuilder(config, backend, weights, share, make_arena(CPU)).build()
        self._model.reserve_positions(CONTEXT)
        num_blocks = 1 + num_rows * -(-CONTEXT // BLOCK_SIZE)
        self._pool = allocate_pool(BlockFormat.of(self._model, BLOCK_SIZE), num_blocks, CPU)
        captured = self._model.capture(self._pool, CaptureSizes(max(num_rows, 16), num_rows, BLOCK_SIZE))
        assert captured is not None
        self._captured: CapturedStep = captured
        self._workload = Workload(num_rows, 1, CONTEXT)
        self.vocab_size = config.vocab_size

    def step(self, seed: int) -> float:
        """Computes a step of some tokens, and returns its seconds."""
        inputs = self._workload.inputs(self.vocab_size)
        inputs.token_ids[:] = np.random.default_rng(seed).integers(0, self.vocab_size, len(inputs.token_ids))
        begin = time.perf_counter()
        self._captured.replay(inputs, with_logits=False)
        return time.perf_counter() - begin

    def active_bytes(self, num_rows: int) -> float:
        """Returns the bytes of weights, keys and values that a step reads: of experts the expected number."""
        held = self._model.parameter_bytes
        for layer in self._model.layers:
            if isinstance(layer.feed, MoE):
                experts = sum(linear.num_bytes for linear in layer.feed.experts.linears)
                # Of rows that choose apart from one another.
                held -= experts * (1 - TOP_K / NUM_EXPERTS) ** num_rows
        attention = self._model.config.attention
        per_token = 2 * attention.num_kv_heads * attention.head_dim * len(self._model.layers) * 2
        return held + num_rows * CONTEXT * per_token


def configure(folder: Path, name: str, num_layers: int) -> ModelConfig:
    """Writes a config.json and reads it."""
    (folder / "config.json").write_text(json.dumps({**SHAPE, **MODELS[name], "num_hidden_layers": num_layers}))
    return read_config(folder, torch.bfloat16)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures both in turn."""
    backend = get_backend(CPU, torch.bfloat16, "auto")
    backend.set_num_threads(options.num_threads)
    with tempfile.TemporaryDirectory() as home:
        steps = {name: Steps(configure(Path(home), name, options.layers), backend, options.rows) for name in MODELS}
    before = ceilings.measure_bandwidth(options.num_threads, 1.0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds + 2):
        for name, each in steps.items():
            seconds[name].append(each.step(number))
    after = ceilings.measure_bandwidth(options.num_threads, 1.0)
    bandwidth = (before.median + after.median) / 2
    results: dict[str, Any] = {"kernels": backend.name, "bandwidth": bandwidth, **vars(options)}
    for name, each in steps.items():
        times = sorted(seconds[name][2:])
        median, quick, num_bytes = statistics.median(times), times[len(times) // 10], each.active_bytes(options.rows)
        results[name] = {
            "active_megabytes": num_bytes / 1e6,
            "milliseconds": 1e3 * median,
            "milliseconds_of_the_quickest_tenth": 1e3 * quick,
            "share_of_read_loop": num_bytes / bandwidth / median,
            "gigabytes_a_second_of_the_quickest_tenth": num_bytes / quick / 1e9,
        }
    llama, mixture = results["llama"], results["mixture"]
    results["mixture_to_llama"] = mixture["share_of_read_loop"] / llama["share_of_read_loop"]
    key = "gigabytes_a_second_of_the_quickest_tenth"
    results["mixture_to_llama_of_the_quickest_tenth"] = mixture[key] / llama[key]
    return results


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1, help="requests at once")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--num-threads", type=int, default=ceilings.usable_processors())
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/mixture-decode.json")
    options = parser.parse_args()
    write = options.write
    del options.write
    results = round_figures(measure(options))
    print(json.dumps(results, indent=2))
    if write:
        record.append("mixture-decode", results)


if __name__ == "__main__":
    main()
