"""Random traces of the core in which tenants flood it, and a quiet tenant asks for something small now and then.

The quiet one has nothing running, is of no lower priority, and asks for what one step can prefill beside its decodes
and what fits into its share of the blocks: its first token has to be there within `MAX_STEPS` steps, whatever else
waits, runs or is swapped out. At the end all that was taken has to finish, and no block may be left behind.

    python -m tests.kit.oracles.fair_traces --traces 1000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from typing import TYPE_CHECKING

from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.values import GroupSpec
from tests.kit.oracles.core_requests import add_request
from tests.kit.oracles.token_rows import TokenRows

if TYPE_CHECKING:
    from scheduler_service.core.values import SchedulerOutput

MAX_STEPS = 4
VOCAB_SIZE = 100
NUM_STEPS = 120
# Steps in which what is left has to finish.
MAX_LAST_STEPS = 20_000
MAX_WAITING = 24


class Trace:
    """One run of a scheduler, a function of the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = self._draw_config()
        self.failures: list[str] = []
        self.num_probes = 0
        self._seed = seed
        self._scheduler = Scheduler(self.config)
        self._next_sequence_id = 1
        self._rows = TokenRows(VOCAB_SIZE, lambda _: seed)
        self._in_flight: deque[SchedulerOutput] = deque()
        self._floods = [(f"flood-{number}", self.random.randint(0, 2)) for number in range(self.random.randint(1, 3))]
        self._num_added = 0
        # The quiet request that has no token yet: its sequence, and the steps since.
        self._probe: tuple[int, int] | None = None
        self._probe_name = ""

    def _draw_config(self) -> CoreConfig:
        draw = self.random
        num_rows = draw.randint(3, 16)
        return CoreConfig(
            block_size=draw.choice([2, 4, 8]),
            num_device_blocks=draw.randint(24, 160),
            num_host_blocks=draw.choice([0, 10, 60]),
            max_model_len=512,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows + draw.randint(4, 40),
            policy=draw.choice(["fcfs", "priority"]),
            victims=draw.choice(["last", "auto"]),
            preemption_mode=draw.choice(["auto", "swap", "recompute"]),
            enable_prefix_caching=draw.random() < 0.7,
            max_steps_in_flight=2,
        )

    def run(self) -> None:
        """Floods, probes, and lets all of it finish."""
        for number in range(NUM_STEPS):
            self._flood()
            if self._probe is None and number > 5 and self.random.random() < 0.15:
                self._ask()
            self._step()
        for _ in range(MAX_LAST_STEPS):
            if not self._scheduler.has_unfinished() and not self._in_flight:
                break
            self._step()
        else:
            self._fail("not all that was taken finishes")
        self._scheduler.check_integrity()
        stats = self._scheduler.stats()
        if stats.num_free_device_blocks != stats.num_device_blocks:
            self._fail("blocks are left behind")

    def _flood(self) -> None:
        draw = self.random
        while self._scheduler.stats().num_waiting < draw.randint(0, MAX_WAITING):
            tenant, priority = draw.choice(self._floods)
            longest = min(self.config.max_tokens - 1, 90)
            num_prompt = draw.randint(1, max(longest // draw.choice([1, 3, 8]), 1))
            max_tokens = draw.randint(1, max(longest - num_prompt, 1))
            self._add(tenant, num_prompt, max_tokens, priority, n=draw.choice([1, 1, 1, 2]))

    def _add(self, tenant: str, num_prompt: int, max_tokens: int, priority: int, n: int = 1) -> int:
        self._num_added += 1
        shared = self.random.random() < 0.3
        start = 0 if shared else self._num_added * 31
        prompt = tuple((start + place) % VOCAB_SIZE for place in range(num_prompt))
        spec = GroupSpec(
            f"{tenant}.{self._num_added}",
            "gateway",
            prompt,
            n,
            max_tokens,
            0,
            frozenset(),
            tenant=tenant,
            priority=priority,
        )
        first, self._next_sequence_id = self._next_sequence_id, self._next_sequence_id + n
        add_request(self._scheduler, spec, first, float(self._num_added))
        return first

    def _ask(self) -> None:
        """The quiet tenant asks, for no more than its share: one of it and of each that floods."""
        config, draw = self.config, self.random
        share = (config.num_device_blocks - 1) // (len(self._floods) + 1) - 2
        longest = min(config.max_num_batched_tokens - config.max_rows, (share - 1) * config.block_size)
        if longest < 1 or config.max_rows <= len(self._floods):
            # There is no share for one more tenant: nobody has too much.
            return
        priority = min(priority for _, priority in self._floods) - draw.randint(0, 1)
        self._probe = (self._add("quiet", draw.randint(1, longest), 1, priority), 0)
        self.num_probes += 1

    def _step(self) -> None:
        while (step := self._scheduler.schedule()) is not None:
            self._in_flight.append(step)
        if not self._in_flight:
            if self._probe is not None:
                self._fail("the quiet tenant waits, and no step is made")
                self._probe = None
            return
        updates = self._scheduler.update(self._rows.execute(self._in_flight.popleft()))
        if self._probe is None:
            return
        sequence_id, num_steps = self._probe
        if any(sequence_id in update.sequence_ids for update in updates.values()):
            self._probe = None
        elif num_steps + 1 >= MAX_STEPS:
            self._fail(f"the quiet tenant has no token after {MAX_STEPS} steps")
            self._probe = None
        else:
            self._probe = (sequence_id, num_steps + 1)

    def _fail(self, what: str) -> None:
        self.failures.append(f"trace {self._seed}: {what}: {self.config}")


def run_traces(num_traces: int, first_seed: int = 0) -> tuple[int, list[str]]:
    """How often a quiet tenant asked in so many traces, and what was wrong."""
    num_probes, failures = 0, list[str]()
    for seed in range(first_seed, first_seed + num_traces):
        trace = Trace(seed)
        trace.run()
        num_probes += trace.num_probes
        failures += trace.failures
    return num_probes, failures


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    options = parser.parse_args()
    begin = time.monotonic()
    num_probes, failures = run_traces(options.traces, options.seed)
    seconds = time.monotonic() - begin
    told = f"{options.traces} traces, {num_probes} questions of a quiet tenant, {seconds:.0f} s"
    sys.stdout.write("\n".join([told, *(f"FAILED: {failure}" for failure in failures)]) + "\n")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
