"""Where the time of a step goes, op by op, beside what each op's bytes and operations would take at best.

    python benchmarks/kernels/phases.py [--model llama-135m] [--concurrency 1 8 32 64] [--rounds 9] [--write]

Replays a captured step of the CPU kernels in this process: one decode for each number of requests, then a long prompt.
Times are medians over the rounds, of all phases of the same op and shape together. The ceilings are measured before and
after each of these steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from ctypes import addressof
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.kernels import ceilings
from benchmarks.kit import ideal, models, record
from benchmarks.kit.figures import round_figures
from benchmarks.kit.ideal import ITEM_BYTES, Shape
from blockyard_kernels.capture import CaptureSizes, StepInputs
from blockyard_kernels.cpu.library import Kind, Rows
from blockyard_kernels.cpu.plan import CapturedPlan
from worker_service.cache_engine import BlockFormat, allocate_pool
from worker_service.models.loader import RunnableModel, load_model

if TYPE_CHECKING:
    from blockyard_kernels.cpu.library import Op

BLOCK_SIZE = 32
CONTEXT = 192
PROMPT_TOKENS = 1024
CEILING_SECONDS = 0.6
PRODUCTS = {Kind.LINEAR, Kind.LINEAR_GATED, Kind.HEAD}


@dataclass(frozen=True, slots=True)
class Workload:
    """A step: so many sequences, each of so many tokens, of which so many are new."""

    num_sequences: int
    num_new_tokens: int
    length: int

    def inputs(self, vocab_size: int, num_kv_groups: int = 1) -> StepInputs:
        """The step, of random ids, each sequence in blocks of its own, also of each KV group."""
        draw = np.random.default_rng(0)
        width = -(-self.length // BLOCK_SIZE)
        num_tables = num_kv_groups * self.num_sequences
        tables = 1 + np.arange(num_tables * width, dtype=np.int32).reshape(num_tables, width)
        new = np.full(self.num_sequences, self.num_new_tokens, np.int64)
        token_ids = draw.integers(0, vocab_size, new.sum())
        return StepInputs(new, np.full_like(new, self.length), tables, token_ids, np.cumsum(new) - 1)


def bytes_and_operations(op: Op, shape: Shape, workload: Workload, kind: str = "bfloat16") -> tuple[float, float]:
    """What an op must read and compute with weights of one of `ITEM_BYTES`; nothing for what the ideal leaves out."""
    if op.kind in PRODUCTS:
        weights = op.in_features * op.out_features
        return float(ITEM_BYTES[kind] * weights), 2.0 * weights * num_rows_of(op, workload)
    if op.kind == Kind.ATTENTION:
        num_pairs = sum(range(workload.length - workload.num_new_tokens + 1, workload.length + 1))
        num_elements = workload.num_sequences * workload.length * shape.num_kv_elements / shape.num_layers
        operations = 4.0 * workload.num_sequences * num_pairs * shape.num_heads * shape.head_dim
        return ITEM_BYTES[dtype_of(kind)] * num_elements, operations
    return 0.0, 0.0


def num_rows_of(op: Op, workload: Workload) -> int:
    """Returns how many rows an op of a step works on."""
    return workload.num_sequences * (1 if op.rows == Rows.CHOSEN else workload.num_new_tokens)


def dtype_of(kind: str) -> str:
    """Returns the dtype that a kind of weights is computed with outside of products."""
    return "bfloat16" if kind == "int8" else kind


class Profile:
    """A loaded model whose step is captured."""

    def __init__(
        self,
        folder: Path,
        num_threads: int,
        max_sequences: int,
        kind: str = "bfloat16",
        cpu_kernels: str = "auto",
        load_format: str = "auto",
    ) -> None:
        """Loads a model.

        Args:
            folder: the model's.
            num_threads: how many threads compute.
            max_sequences: the most of one step.
            kind: how weights are held, one of `ITEM_BYTES`.
            cpu_kernels: an instruction set, or "auto".
            load_format: "random" for a folder without weights.
        """
        self.shape = Shape.read(folder)
        self._num_threads = num_threads
        cpu, dtype = torch.device("cpu"), getattr(torch, dtype_of(kind))
        quantization = "int8" if kind == "int8" else "none"
        self._loaded: RunnableModel = load_model(
            folder, dtype, cpu, lambda done, total: None, cpu_kernels, quantization, load_format
        )
        self._loaded.backend.set_num_threads(num_threads)
        self._loaded.model.reserve_positions(PROMPT_TOKENS)
        self.num_kv_groups = self._loaded.model.kv_groups.num_groups
        most = max(max_sequences * -(-CONTEXT // BLOCK_SIZE), PROMPT_TOKENS // BLOCK_SIZE)
        num_blocks = 1 + most * self.num_kv_groups
        # The plan has its address, and does not hold it.
        self._pool = allocate_pool(BlockFormat.of(self._loaded.model, BLOCK_SIZE), num_blocks, cpu)
        sizes = CaptureSizes(PROMPT_TOKENS, max_sequences, BLOCK_SIZE, self._loaded.config.sliding_window)
        captured = self._loaded.model.capture(self._pool, sizes)
        if not isinstance(captured, CapturedPlan):
            raise SystemExit(
                "the CPU kernels are not built, or not for this processor: python -m blockyard_kernels.cpu.build"
            )
        self._plan = captured

    @property
    def kernels(self) -> str:
        """Which kernels compute."""
        return self._loaded.backend.name

    def replay(self, inputs: StepInputs) -> list[tuple[Op, float]]:
        """Computes a step, and returns each op in order with its seconds."""
        self._plan.replay(inputs, with_logits=False)
        ops: list[tuple[Op, float]] = []
        for op, seconds in self._plan.phase_seconds():
            # The head, and what is quantized, has several phases.
            if ops and addressof(ops[-1][0]) == addressof(op):
                seconds += ops.pop()[1]
            ops.append((op, seconds))
        return ops

    def measure(self, workload: Workload, num_rounds: int) -> dict[str, Any]:
        """The step's time by op, in milliseconds, beside the ceilings of the moment."""
        inputs = workload.inputs(self.shape.vocab_size, self.num_kv_groups)
        before = self._measure_machine()
        # The first one warms up.
        rounds = [self.replay(inputs) for _ in range(1 + num_rounds)][1:]
        after = self._measure_machine()
        bandwidth = (before.bandwidth + after.bandwidth) / 2
        matrix_rate = (before.matrix_rate + after.matrix_rate) / 2
        attention_rate = (before.attention_rate + after.attention_rate) / 2
        seconds, least = defaultdict[str, float](float), defaultdict[str, float](float)
        for ops in zip(*rounds, strict=True):
            op = ops[0][0]
            seconds[name_of(op)] += statistics.median(each for _, each in ops)
            num_bytes, operations = bytes_and_operations(op, self.shape, workload)
            rate = attention_rate if op.kind == Kind.ATTENTION else matrix_rate
            least[name_of(op)] += max(num_bytes / bandwidth, operations / rate)
        return {
            "bandwidth": bandwidth,
            "bfloat16_rate": matrix_rate,
            "attention_rate": attention_rate,
            "milliseconds": 1e3 * sum(seconds.values()),
            "ops": {
                name: {"milliseconds": 1e3 * spent, "share_of_ceiling": least[name] / spent}
                for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
            },
        }

    def _measure_machine(self) -> ideal.Machine:
        return ideal.machine_for(ceilings.measure(self._num_threads, CEILING_SECONDS), "bfloat16")


def name_of(op: Op) -> str:
    """Returns what ops of one kind and shape have in common, such as "linear 576x960"."""
    name = Kind(cast("int", op.kind)).name.lower()
    return f"{name} {op.in_features}x{op.out_features}" if op.kind in PRODUCTS else name


def report(results: dict[str, Any]) -> str:
    """A table for each step."""
    lines = [f"{results['model']}, bfloat16, {results['num_threads']} threads, kernels {results['kernels']}"]
    for step, measured in results["steps"].items():
        giga = f"{measured['bandwidth'] / 1e9:.1f} GB/s, {measured['bfloat16_rate'] / 1e9:.0f} GFLOP/s"
        lines.append(f"\n{step}: {measured['milliseconds']:.2f} ms; ceilings {giga}")
        for name, op in measured["ops"].items():
            share = f"{op['share_of_ceiling']:6.0%}" if op["share_of_ceiling"] else ""
            lines.append(f"  {name:28}{op['milliseconds']:9.3f} ms{share}")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", help="a name of benchmarks/kit/models.py, or a folder")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64], help="requests at once")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--num-threads", type=int, default=ceilings.usable_processors())
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/phases-MODEL.json")
    options = parser.parse_args()
    folder = models.make_model(options.model) if options.model in models.RECIPES else Path(options.model).resolve()
    profile = Profile(folder, options.num_threads, max(options.concurrency))
    steps = {f"decode, {number} requests": Workload(number, 1, CONTEXT) for number in options.concurrency}
    steps[f"prefill, {PROMPT_TOKENS} tokens"] = Workload(1, PROMPT_TOKENS, PROMPT_TOKENS)
    results = round_figures(
        {
            "model": folder.name,
            "num_threads": options.num_threads,
            "kernels": profile.kernels,
            "steps": {name: profile.measure(workload, options.rounds) for name, workload in steps.items()},
        }
    )
    print(report(results))
    if options.write:
        record.append(f"phases-{folder.name}", results)


if __name__ == "__main__":
    main()
