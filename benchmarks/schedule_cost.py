"""What `schedule()` and `update()` cost at 256 running sequences in steady decode, with 0 and 10,000 waiting.

Also where the worker drafts in every step, and where it may but no draft can pay.

    python benchmarks/schedule_cost.py [--write]

Prints the median and the 99th percentile in microseconds of CPU time, which other programs do not disturb much. The
target is a median of 250 for each.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import record
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import GroupSpec, SchedulerOutput, StepResult

NUM_RUNNING = 256
NUM_WARM_UP = 50
NUM_STEPS = 1000
PROMPT_LENGTH = 64
BLOCK_SIZE = 16


def make_request(number: int) -> GroupSpec:
    """A request that runs longer than the measurement. Lengths differ, so that blocks fill up in different steps."""
    prompt = tuple((number * 7919 + place) % 32_000 for place in range(PROMPT_LENGTH + number % BLOCK_SIZE))
    return GroupSpec(f"request-{number}", "gateway", prompt, 1, 4000, 0, frozenset({32_001}))


def answer(step: SchedulerOutput) -> StepResult:
    """What a worker would say: every row of these steps is sampled, and a third of the drafts are right."""
    counts = tuple([1 + most // 3 for most in step.max_draft_tokens])
    num_tokens, num_drafts = sum(counts) or len(step.sequence_ids), sum(step.max_draft_tokens)
    return StepResult(
        step.step_id,
        step.sequence_ids,
        tuple(range(100, 100 + num_tokens)),
        num_tokens=counts,
        num_draft_tokens=num_drafts,
        num_accepted_tokens=num_tokens - len(step.sequence_ids),
    )


def start(num_waiting: int, speculation: str) -> tuple[Scheduler, deque[SchedulerOutput]]:
    """A scheduler with all rows in decode, and one step in flight."""
    config = CoreConfig(
        block_size=BLOCK_SIZE,
        num_device_blocks=NUM_RUNNING * 100,
        num_host_blocks=1000,
        max_model_len=8192,
        max_num_seqs=NUM_RUNNING,
        max_num_batched_tokens=NUM_RUNNING * (PROMPT_LENGTH + BLOCK_SIZE),
        max_draft_tokens=0 if speculation == "none" else 11,
        max_draft_rows=32,
        prices_drafts=speculation == "auto",
    )
    scheduler = Scheduler(config)
    # Each row takes as long as the first one, so no draft can pay.
    scheduler.seed_pace((1, 2), (1.0, 2.0))
    for number in range(NUM_RUNNING + num_waiting):
        spec = make_request(number)
        scheduler.adopt([Group(spec, number + 1, config.fit(spec), 0.0)])
    step = scheduler.schedule()
    assert step is not None
    assert len(step.sequence_ids) == NUM_RUNNING
    return scheduler, deque([step])


def measure(num_waiting: int, speculation: str = "none") -> dict[str, float | str]:
    """Microseconds: median and 99th percentile of both calls."""
    scheduler, in_flight = start(num_waiting, speculation)
    schedule_seconds: list[float] = []
    update_seconds: list[float] = []
    for _ in range(NUM_WARM_UP + NUM_STEPS):
        begin = time.thread_time()
        step = scheduler.schedule()
        middle = time.thread_time()
        assert step is not None
        in_flight.append(step)
        result = answer(in_flight.popleft())
        end = time.thread_time()
        scheduler.update(result)
        update_seconds.append(time.thread_time() - end)
        schedule_seconds.append(middle - begin)
    return {
        "num_waiting": num_waiting,
        "speculation": speculation,
        **summarize("schedule", schedule_seconds[NUM_WARM_UP:]),
        **summarize("update", update_seconds[NUM_WARM_UP:]),
    }


def summarize(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    return {
        f"{name}_median_us": round(statistics.median(seconds) * 1e6, 1),
        f"{name}_p99_us": round(statistics.quantiles(seconds, n=100)[98] * 1e6, 1),
    }


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep this run in benchmarks/results/schedule_cost.json")
    options = parser.parse_args()
    gc.freeze()  # as the scheduler's process does after its start
    results = [measure(0), measure(10_000), measure(0, "auto"), measure(0, "ngram")]
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    if options.write:
        record.append("schedule_cost", results)


if __name__ == "__main__":
    main()
