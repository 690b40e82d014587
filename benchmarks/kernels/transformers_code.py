"""A model of ours as transformers' code computes it (`--model-code transformers`), against our own code: a step's time.

    python benchmarks/kernels/transformers_code.py [--sequences 1,8,32] [--steps 30] [--threads 2] [--write]

Makes a model of Qwen3's architecture and a size of 0.5 B with random weights, loads it both ways in one process, and
lets them take turns with decodes. Prints the median of each in milliseconds, and their ratio: of the time that passes,
and of the time of the processor, which other programs disturb less (then take --threads 1). The target is 1.25.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from benchmarks.kit import record
from blockyard_kernels.capture import CaptureSizes
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.models.loader import load_model
from worker_service.runner.dry_runs import dry_decode
from worker_service.runner.model_runner import ModelRunner

BLOCK_SIZE = 32
CODES = ("native", "transformers")


def write_model(folder: Path, num_layers: int, dtype: str) -> None:
    """Writes the shape of Qwen2.5-0.5B as a Qwen3."""
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=num_layers,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)


class Decodes:
    """One model, and the decodes of it."""

    def __init__(self, folder: Path, code: str, max_num_seqs: int) -> None:
        loaded = load_model(folder, None, torch.device("cpu"), lambda done, total: None, model_code=code)
        self.runner = ModelRunner(loaded)
        self.pool = allocate_pool(BlockFormat.of(loaded.model, BLOCK_SIZE), 2, loaded.backend.device)
        loaded.model.reserve_positions(1024)
        self.is_exact = self.runner.prove_batch_invariance()
        self.runner.capture(self.pool, CaptureSizes(max_num_seqs, max_num_seqs, BLOCK_SIZE, None))

    def milliseconds(self, num_sequences: int) -> tuple[float, float]:
        """Measures a decode of so many sequences: the time that passes, and the processor's."""
        started, processor = time.perf_counter(), time.process_time()
        dry_decode(self.runner, self.pool, BLOCK_SIZE, num_sequences)
        return 1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - processor)


def measure(models: dict[str, Decodes], num_sequences: int, num_steps: int) -> dict[str, float]:
    """Measures decodes in turns."""
    times: dict[str, list[tuple[float, float]]] = {code: [] for code in models}
    for step in range(num_steps + 3):
        for code, model in models.items():
            taken = model.milliseconds(num_sequences)
            if step >= 3:
                times[code].append(taken)
    result: dict[str, float] = {"sequences": num_sequences}
    for place, kind in enumerate(("", "processor_")):
        medians = {code: statistics.median(taken[place] for taken in each) for code, each in times.items()}
        result |= {f"{kind}{code}": round(median, 2) for code, median in medians.items()}
        result[f"{kind}ratio"] = round(medians["transformers"] / medians["native"], 3)
    return result


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sequences.split(",")]
    with tempfile.TemporaryDirectory() as home:
        write_model(Path(home), options.layers, options.dtype)
        models = {code: Decodes(Path(home), code, max(sizes)) for code in CODES}
    for model in models.values():
        model.runner.backend.set_num_threads(options.threads)
    print("batch invariant:", {code: model.is_exact for code, model in models.items()})
    results = [measure(models, size, options.steps) for size in sizes]
    for result in results:
        print(result)
    if options.write:
        settings = {"layers": options.layers, "dtype": options.dtype, "threads": options.threads}
        record.append("transformers_code", {**settings, "steps": results})


if __name__ == "__main__":
    main()
