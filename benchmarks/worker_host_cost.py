"""What a step costs the worker's device thread beside the network: checking, rows, and the answer, in steady decode.

    python benchmarks/worker_host_cost.py [--write]

The network here costs nothing: it answers fixed tokens. Prints microseconds, the median over steps: of each part, of
the whole, of the whole with the processor's caches swept before, as a network leaves them, and of the whole when in
each step a sequence comes for another that goes. Rows are greedy, which the forward pass itself samples, or they draw,
and the sampler asks what for. The target for greedy rows is a whole of 60 for one sequence and of 150 for 64. What is
swept needs a quiet machine: a busy one triples it and leaves the rest as it is.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import record
from blockyard.contract.sampling import SamplingParams
from blockyard_kernels.select import get_backend
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.cache_engine import BlockFormat, CacheEngine
from worker_service.lora.slots import AdapterSlots
from worker_service.runner.model_runner import ModelRunner, RunnerOutput
from worker_service.sampling.sampler import Sampled
from worker_service.step import NewRow, Step
from worker_service.steps.step_executor import StepExecutor
from worker_service.steps.validation import check_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.batch.forward_batch import ForwardBatch
    from worker_service.step import Array

COUNTS = (1, 8, 32, 64)
NUM_WARM_UP = 50
NUM_STEPS, NUM_SWEPT_STEPS = 500, 50
SWEPT_BYTES = 128 << 20
PROMPT_LENGTH = 128
BLOCK_SIZE = 32
FIRST_ID = 1_000_000
# All prompts at once are one step.
LIMITS = BatchLimits(
    max_model_len=2048, max_num_seqs=64, block_size=BLOCK_SIZE, vocab_size=50_000, max_num_batched_tokens=16_384
)
GREEDY, DRAWING = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=40)
PARTS = ("check", "apply", "plan", "sample_rows", "commit")


class FreeRunner:
    """A model runner that answers fixed tokens, having asked the batch for what it has to."""

    depth = 1
    slots = AdapterSlots()

    def run(self, forward_batch: ForwardBatch, batch: InputBatch, kv_pool: torch.Tensor) -> RunnerOutput:
        """Samples token 7 everywhere."""
        ask(forward_batch, batch)
        num_sampled = len(forward_batch.layout.sampled)
        nothing = np.zeros(num_sampled, np.bool_)
        return RunnerOutput(Sampled(np.full(num_sampled, 7), nothing, nothing))


def ask(forward_batch: ForwardBatch, batch: InputBatch) -> None:
    """Asks for what the sampler needs."""
    if not forward_batch.layout.sampled.is_plain_greedy:
        batch.sample_rows(forward_batch.layout.sampled)


class Steps:
    """The steps that a scheduler sends: all prompts at once, then decodes. Blocks are full in different steps."""

    def __init__(self, num_sequences: int, sampling: SamplingParams) -> None:
        self._ids = np.arange(FIRST_ID, FIRST_ID + num_sequences)
        self._lengths = PROMPT_LENGTH + np.arange(num_sequences) % BLOCK_SIZE
        self._sampling = sampling
        self._step_id = 0

    def first(self) -> Step:
        """All prompts at once."""
        new = tuple(map(self._new, self._ids.tolist(), self._lengths.tolist()))
        return self._step(self._lengths.copy(), new_sequences=new)

    def decode(self) -> Step:
        """One token of each."""
        self._lengths += 1
        full = self._ids[self._lengths % BLOCK_SIZE == 1]
        num_new_tokens = np.ones(len(self._ids), np.int64)
        return self._step(
            num_new_tokens, appended_sequence_ids=tuple(full.tolist()), appended_block_ids=np.full(len(full), 5)
        )

    def decode_and_replace(self) -> Step:
        """One token of each, but for one that is finished and another's whole prompt in its place."""
        place = self._step_id % len(self._ids)
        self._lengths[place] = PROMPT_LENGTH - 1
        finished = int(self._ids[place])
        self._ids[place] += 1000
        step = self.decode()
        step.num_new_tokens[place] = PROMPT_LENGTH
        return replace(
            step, finished_sequence_ids=(finished,), new_sequences=(self._new(int(self._ids[place]), PROMPT_LENGTH),)
        )

    def _new(self, sequence_id: int, length: int) -> NewRow:
        token_ids, block_ids = np.arange(length), np.arange(1, 2 - -length // BLOCK_SIZE)
        return NewRow(sequence_id, 0, token_ids, length, 0, block_ids, self._sampling, 0, (2,))

    def _step(self, num_new_tokens: Array, **fields: Any) -> Step:
        """Makes a step whose ids and columns are new objects, as a codec makes them."""
        self._step_id += 1
        return Step(1, self._step_id, sequence_ids=tuple(self._ids.tolist()), num_new_tokens=num_new_tokens, **fields)


def make_executor() -> StepExecutor:
    """One without a network."""
    backend = get_backend(torch.device("cpu"), torch.float32, "reference")
    cache = CacheEngine(BlockFormat(1, 1, BLOCK_SIZE, 1, torch.float32), 64, 4, backend)
    executor = StepExecutor(InputBatch(LIMITS), cache, cast("ModelRunner", FreeRunner()))
    executor.begin_epoch(1)
    return executor


def run_in_parts(executor: StepExecutor, step: Step) -> list[float]:
    """Does the parts of a step as the executor does, and gives the seconds of each."""
    batch, cache = executor.batch, executor.cache
    times = [time.perf_counter()]
    assert check_step(step, batch, cache.num_device_blocks, cache.num_host_blocks) is None
    times.append(time.perf_counter())
    batch.apply(step)
    times.append(time.perf_counter())
    forward_batch = batch.make_forward_batch(step)
    times.append(time.perf_counter())
    ask(forward_batch, batch)
    times.append(time.perf_counter())
    num_sampled = len(forward_batch.layout.sampled)
    batch.commit(forward_batch, np.full(num_sampled, 7), np.zeros(num_sampled, np.bool_))
    times.append(time.perf_counter())
    return np.diff(times).tolist()


def run_whole(executor: StepExecutor, step: Step) -> list[float]:
    """Executes a step and gives its seconds."""
    started = time.perf_counter()
    result = executor.execute(step, started)
    seconds = time.perf_counter() - started
    assert result.refusal is None
    return [seconds]


def measure(num_sequences: int, sampling: SamplingParams) -> dict[str, float]:
    """Returns microseconds of the parts and of the wholes."""
    sweep = np.zeros(SWEPT_BYTES // 8)

    def run_swept(executor: StepExecutor, step: Step) -> list[float]:
        sweep.sum()
        return run_whole(executor, step)

    return {
        **median_times(PARTS, run_in_parts, NUM_STEPS, Steps(num_sequences, sampling), Steps.decode),
        **median_times(("whole",), run_whole, NUM_STEPS, Steps(num_sequences, sampling), Steps.decode),
        **median_times(("swept",), run_swept, NUM_SWEPT_STEPS, Steps(num_sequences, sampling), Steps.decode),
        **median_times(("joining",), run_whole, NUM_STEPS, Steps(num_sequences, sampling), Steps.decode_and_replace),
    }


def median_times(
    names: tuple[str, ...],
    run: Callable[[StepExecutor, Step], list[float]],
    num_steps: int,
    steps: Steps,
    following: Callable[[Steps], Step],
) -> dict[str, float]:
    """Runs steps and gives the median of each time that a run gives, in microseconds."""
    executor = make_executor()
    run(executor, steps.first())
    rows = [run(executor, following(steps)) for _ in range(NUM_WARM_UP + num_steps)]
    medians = map(statistics.median, zip(*rows[NUM_WARM_UP:], strict=True))
    return {name: round(seconds * 1e6, 1) for name, seconds in zip(names, medians, strict=True)}


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results")
    options = parser.parse_args()
    gc.freeze()  # as the worker's process does after its start
    results = [
        {"rows": name, "num_sequences": count, **measure(count, sampling)}
        for name, sampling in (("greedy", GREEDY), ("drawing", DRAWING))
        for count in COUNTS
    ]
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    if options.write:
        record.append("worker_host_cost", results)


if __name__ == "__main__":
    main()
