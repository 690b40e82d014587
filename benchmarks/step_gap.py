"""The time between two replays of a worker that decodes, with and without its steady loop.

    python benchmarks/step_gap.py [--model llama-135m] [--concurrency 1 8 64] [--steps 150] [--rounds 5] [--write]

The worker is alone in its process, without sockets: its event loop decodes steps from their bytes and encodes the
answers, two steps are in flight. Prints, for each number of requests, the median microseconds from the end of a replay
to the begin of the next, the milliseconds from one begin to the next of the quickest tenth of steps, and how many times
as fast these come with the loop as without. All are the best of the rounds, which alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import itertools

from benchmarks.kit import models, record
from benchmarks.kit.worker_alone import Settings, set_up
from blockyard.common.v1 import sampling_pb2
from blockyard.worker.v1 import worker_pb2
from blockyard_kernels.cpu.library import Executor
from worker_service.codec import decode_step, encode_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from worker_service.worker import Worker

BLOCK_SIZE, PROMPT_LENGTH, NUM_IN_FLIGHT = 32, 128, 2
# Steps before the clock starts: prompts, and the first ones behind them.
NUM_WARM_UP = 10


@dataclass(frozen=True, slots=True)
class Round:
    """One round: the seconds of a quick step, and the median gap in microseconds."""

    step_seconds: float
    gap: float


def make_messages(epoch: int, num_sequences: int, num_steps: int) -> Iterator[bytes]:
    """Encodes the steps of a round: all prompts, one after another, then decodes."""
    width = -(-(PROMPT_LENGTH + num_steps) // BLOCK_SIZE) + 1
    ids = list(range(1, num_sequences + 1))
    sampling = sampling_pb2.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0).SerializeToString()
    step_id = 0
    for sequence_id in ids:
        step_id += 1
        new = worker_pb2.NewSequence(
            sequence_id=sequence_id,
            token_ids=range(1000 * sequence_id % 40000, 1000 * sequence_id % 40000 + PROMPT_LENGTH),
            prompt_length=PROMPT_LENGTH,
            block_ids=range(1 + (sequence_id - 1) * width, 1 + sequence_id * width),
            sampling_params=sampling,
        )
        yield worker_pb2.ExecuteModelRequest(
            epoch=epoch,
            step_id=step_id,
            new_sequences=[new],
            sequence_ids=[sequence_id],
            num_new_tokens=[PROMPT_LENGTH],
        ).SerializeToString()
    for _ in range(num_steps):
        step_id += 1
        yield worker_pb2.ExecuteModelRequest(
            epoch=epoch, step_id=step_id, sequence_ids=ids, num_new_tokens=[1] * num_sequences
        ).SerializeToString()


class Replays:
    """Notes when Python's replays begin and end."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        run: Callable[..., None] = Executor.run

        def timed(executor: Executor, *arguments: Any) -> None:
            begin = time.perf_counter()
            run(executor, *arguments)
            self.times.append((begin, time.perf_counter()))

        Executor.run = timed


async def run_round(worker: Worker, replays: Replays, num_sequences: int, num_steps: int) -> Round:
    """Runs one epoch."""
    epoch = worker.epoch + 1
    messages = make_messages(epoch, num_sequences, NUM_WARM_UP + num_steps)
    stream = worker.open_stream()
    answers = stream.answers()
    num_answered, num_due = 0, num_sequences + NUM_WARM_UP + num_steps
    spans: list[tuple[float, float]] = []

    def send() -> None:
        if (message := next(messages, None)) is not None:
            stream.submit(decode_step(worker_pb2.ExecuteModelRequest.FromString(message)))

    for _ in range(NUM_IN_FLIGHT):
        send()
    while num_answered < num_due:
        answer = await anext(answers)
        assert answer.refusal is None, answer.refusal
        encode_result(answer).SerializeToString()
        send()
        num_answered += 1
        if num_answered == num_sequences + NUM_WARM_UP:
            replays.times.clear()
        spans.append((answer.times.begun_at, answer.times.begun_at + answer.times.forward_seconds))
    worker.close_stream(stream)
    await worker.run(lambda: None)
    # The loop's own steps begin with their inputs and are not seen by Python.
    times = replays.times if len(replays.times) > num_steps // 2 else spans[-num_steps:]
    gaps = [after[0] - before[1] for before, after in itertools.pairwise(times)]
    # On a busy machine only the quickest steps are undisturbed.
    periods = [after[0] - before[0] for before, after in itertools.pairwise(times)]
    return Round(statistics.quantiles(periods, n=10)[0], statistics.median(gaps) * 1e6)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures all numbers of requests."""
    width = -(-(PROMPT_LENGTH + options.steps + NUM_WARM_UP) // BLOCK_SIZE) + 1
    num_blocks = 1 + max(32, width * max(options.concurrency))
    worker = await set_up(
        Settings(
            options.folder,
            num_threads=options.threads,
            num_device_blocks=num_blocks,
            cpu_kernels=options.cpu_kernels,
            max_model_len=1024,
        )
    )
    executor, replays = worker.set_up.executor, Replays()
    assert executor is not None
    steady = executor.steady
    results = []
    for count in options.concurrency:
        rounds: dict[bool, list[Round]] = {True: [], False: []}
        for number in range(2 * options.rounds):
            executor.steady = steady if (loops := number % 2 == 1) else None
            rounds[loops].append(await run_round(worker, replays, count, options.steps))
        best = {loops: min(each.step_seconds for each in some) for loops, some in rounds.items()}
        results.append(
            {
                "concurrency": count,
                "python_gap_us": round(min(each.gap for each in rounds[False]), 1),
                "loop_gap_us": round(min(each.gap for each in rounds[True]), 1),
                "python_step_ms": round(best[False] * 1e3, 3),
                "loop_step_ms": round(best[True] * 1e3, 3),
                "speed": round(best[False] / best[True], 3),
            }
        )
        print("  ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    await worker.stop(5.0)
    return results


def main() -> None:
    """Measures, prints, and writes if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-135m", help="a name of benchmarks/kit/models.py, or a folder")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results")
    parser.add_argument("--cpu-kernels", default="auto")
    options = parser.parse_args()
    options.folder = options.model if Path(options.model).is_dir() else str(models.make_model(options.model))
    sys.setswitchinterval(1e-4)
    results = asyncio.run(measure(options))
    if options.write:
        record.append("step_gap", results)


if __name__ == "__main__":
    main()
