"""The time that `schedule()` and `update()` take with 8, 64 and 256 running sequences in steady decode.

Of 256 also with 10,000 waiting; of each where no draft can pay (auto), and where the worker drafts 32 tokens in every
step, of which a third is right (ngram). Such a step brings more tokens, so the cost of each is shown as well.

    python benchmarks/schedule_cost.py [--rounds 5] [--write]

Prints the median and the 99th percentile in microseconds of CPU time, which other programs do not disturb much: of the
rounds, which take turns, the one with the least median. The target is a median of 250 for each.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import deque
from operator import add, itemgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.kit import record
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import GroupSpec, SchedulerOutput, StepResult

NUMS_RUNNING = (8, 64, 256)
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


def start(num_running: int, num_waiting: int, speculation: str) -> tuple[Scheduler, deque[SchedulerOutput]]:
    """A scheduler with all rows in decode, and one step in flight."""
    config = CoreConfig(
        block_size=BLOCK_SIZE,
        num_device_blocks=num_running * 100,
        num_host_blocks=1000,
        max_model_len=8192,
        max_num_seqs=num_running,
        max_num_batched_tokens=num_running * (PROMPT_LENGTH + BLOCK_SIZE),
        max_draft_tokens=0 if speculation == "none" else 11,
        max_draft_rows=32,
        prices_drafts=speculation == "auto",
    )
    scheduler = Scheduler(config)
    # Each row takes as long as the first one, so no draft can pay.
    scheduler.seed_pace((1, 2), (1.0, 2.0))
    for number in range(num_running + num_waiting):
        spec = make_request(number)
        scheduler.adopt([Group(spec, number + 1, config.fit(spec), 0.0)])
    step = scheduler.schedule()
    assert step is not None
    assert len(step.sequence_ids) == num_running
    return scheduler, deque([step])


def measure(num_running: int, num_waiting: int, speculation: str) -> dict[str, float | str]:
    """Microseconds: median and 99th percentile of both calls."""
    scheduler, in_flight = start(num_running, num_waiting, speculation)
    num_tokens = 0
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
        num_tokens += len(result.token_ids)
    both = statistics.median(map(add, schedule_seconds[NUM_WARM_UP:], update_seconds[NUM_WARM_UP:]))
    return {
        "num_running": num_running,
        "num_waiting": num_waiting,
        "speculation": speculation,
        **summarize("schedule", schedule_seconds[NUM_WARM_UP:]),
        **summarize("update", update_seconds[NUM_WARM_UP:]),
        "us_per_token": round(both * 1e6 * (NUM_WARM_UP + NUM_STEPS) / num_tokens, 2),
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
    parser.add_argument("--rounds", type=int, default=5, help="times that each case is measured")
    options = parser.parse_args()
    gc.freeze()  # as the scheduler's process does after its start
    cases = [(num_running, 0, speculation) for num_running in NUMS_RUNNING for speculation in ("none", "auto", "ngram")]
    cases.append((NUMS_RUNNING[-1], 10_000, "none"))
    rounds = [[measure(*case) for case in cases] for _ in range(options.rounds)]
    results = [min(each, key=itemgetter("schedule_median_us")) for each in zip(*rounds, strict=True)]
    for result in results:
        print("  ".join(f"{name} {value}" for name, value in result.items()))
    if options.write:
        record.append("schedule_cost", results)


if __name__ == "__main__":
    main()
