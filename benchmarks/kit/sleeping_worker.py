"""A worker process as it is, but for its steps: each takes a fixed time, in which the device thread sleeps.

    python -m benchmarks.kit.sleeping_worker 0.004 /tmp/ledger --worker-address=unix:/…

Its ledger is a file of two numbers that another process reads while it runs:
the steps that it has executed, and the CPU seconds that its pretended computing cost, which are nobody's.
"""

from __future__ import annotations

import functools
import mmap
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from blockyard.service import grpc_environment

grpc_environment.prepare()

from blockyard.service.process import run_process
from blockyard.settings import load
from worker_service import server
from worker_service.config import WorkerConfiguration
from worker_service.step import Step, StepOutput, StepTimes
from worker_service.steps.step_executor import StepExecutor
from worker_service.worker import Worker

if TYPE_CHECKING:
    from blockyard.contract.workers import CacheInfo, CachePlan

_LEDGER = struct.Struct("<Qd")
# Of the demo model's vocabulary: whole words and pieces of words, none of them special.
_FIRST_TOKEN_ID, _NUM_TOKEN_IDS = 300, 1000


class Entry(NamedTuple):
    """What a ledger says."""

    num_steps: int
    computing_seconds: float


def read_ledger(path: Path) -> Entry:
    """Reads how far a worker is."""
    return Entry(*_LEDGER.unpack(path.read_bytes()))


class _Sequence:
    """A sequence, as far as it matters when it samples."""

    __slots__ = ("num_computed", "num_known", "token_id")

    def __init__(self, num_known: int, num_computed: int, token_id: int) -> None:
        self.num_known = num_known
        self.num_computed = num_computed
        self.token_id = token_id

    def advance(self, num_tokens: int) -> bool:
        """Computes tokens; returns whether the last known one was among them, and then knows one more."""
        self.num_computed += num_tokens
        is_sampled = self.num_computed == self.num_known
        self.num_known += is_sampled
        self.token_id = _FIRST_TOKEN_ID + (self.token_id * 31 + 7) % _NUM_TOKEN_IDS
        return is_sampled


class SleepingExecutor(StepExecutor):
    """A step begins when its predecessor has ended, as on a device."""

    def __init__(self, executor: StepExecutor, step_seconds: float, ledger: Path) -> None:
        """Takes the place of an executor, whose rows and blocks it leaves as they are."""
        super().__init__(executor.batch, executor.cache, executor.runner)
        ledger.write_bytes(_LEDGER.pack(0, 0.0))
        with ledger.open("r+b") as file:
            self._ledger = mmap.mmap(file.fileno(), _LEDGER.size)
        self._step_seconds = step_seconds
        self._sequences: dict[int, _Sequence] = {}
        self._free_at = 0.0
        self._entry = Entry(0, 0.0)

    def forget(self) -> None:
        """Forgets every sequence."""
        super().forget()
        self._sequences.clear()

    def execute(self, step: Step, arrival: float) -> StepOutput:
        """Sleeps, and gives each sequence that is due a token."""
        begin = time.thread_time()
        result = self._pretend(step)
        self._free_at = max(arrival, self._free_at) + self._step_seconds
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        num_steps, seconds = self._entry
        self._entry = Entry(num_steps + 1, seconds + time.thread_time() - begin)
        _LEDGER.pack_into(self._ledger, 0, *self._entry)
        return result

    def _pretend(self, step: Step) -> StepOutput:
        for sequence_id in step.finished_sequence_ids:
            self._sequences.pop(sequence_id, None)
        for new in step.new_sequences:
            sequence = _Sequence(len(new.token_ids), new.num_computed_tokens, new.sequence_id)
            self._sequences[new.sequence_id] = sequence
        counts = zip(step.sequence_ids, step.num_new_tokens.tolist(), strict=True)
        sampled = tuple(sequence_id for sequence_id, count in counts if self._sequences[sequence_id].advance(count))
        token_ids = tuple(self._sequences[sequence_id].token_id for sequence_id in sampled)
        times = StepTimes(forward_seconds=self._step_seconds)
        return StepOutput(step.epoch, step.step_id, sampled, token_ids, times=times)


class SleepingWorker(Worker):
    """A worker that loads a model and tells of it what a worker tells, and computes nothing."""

    def __init__(self, step_seconds: float, ledger: Path, **settings: Any) -> None:
        super().__init__(**settings)
        self._step_seconds, self._ledger_path = step_seconds, ledger

    async def initialize_cache(self, request: CachePlan) -> CacheInfo:
        """Makes the cache, and puts another executor in the place of the one that computes."""
        cache = await super().initialize_cache(request)
        assert self.set_up.executor is not None
        executor = SleepingExecutor(self.set_up.executor, self._step_seconds, self._ledger_path)
        self.set_up = replace(self.set_up, executor=executor)
        return cache


def main() -> None:
    """The program."""
    step_seconds, ledger, *flags = sys.argv[1:]
    configuration = load(WorkerConfiguration, "sleeping_worker", "Sleeps.", [*flags, "--num-threads=1"])
    # The server makes its worker itself.
    worker = functools.partial(SleepingWorker, float(step_seconds), Path(ledger))
    cast("Any", server).Worker = worker
    run_process("worker", configuration, server.serve)


if __name__ == "__main__":
    main()
