"""A worker process as it is, but for its network: a step takes a fixed time, in which the device thread sleeps.

    python -m benchmarks.kit.sleeping_worker 0.004 /tmp/ledger --worker-address=unix:/…

Its ledger is a file of two numbers that another process reads while it runs:
the steps that it has executed, and the CPU seconds that its pretended computing cost, which are nobody's.
"""

from __future__ import annotations

import gc
import json
import mmap
import struct
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from blockyard.service import grpc_environment

grpc_environment.prepare()

from blockyard.capacity.adapters import NO_LORAS, LoraLimits
from blockyard.capacity.memory import CachePlan, Usage
from blockyard.model_files import model_digest, resolve_model
from blockyard.parallel import ALONE, Parallel
from blockyard.service.process import run_process
from blockyard.settings import load
from worker_service import server
from worker_service.config import WorkerConfiguration
from worker_service.set_up import CacheFacts, DeviceChoice, SetUp
from worker_service.step import Step, StepResult, StepTimes
from worker_service.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard.capacity.limits import ProfileRequest
    from worker_service.models.loader import LoadedModel
    from worker_service.set_up import CacheRequest

MAX_MODEL_LEN = 2048
MAX_NUM_SEQS = 1024
BLOCK_SIZE = 32
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


class _Row:
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


class SleepingExecutor:
    """Executes steps in the place of `StepExecutor`. A step begins when its predecessor has ended, as on a device."""

    def __init__(self, step_seconds: float, ledger: Path) -> None:
        ledger.write_bytes(_LEDGER.pack(0, 0.0))
        with ledger.open("r+b") as file:
            self._ledger = mmap.mmap(file.fileno(), _LEDGER.size)
        self._step_seconds = step_seconds
        # What the step stream reads of a batch.
        self.batch = SimpleNamespace(limits=SimpleNamespace(max_num_seqs=MAX_NUM_SEQS))
        self.epoch = 0
        # And of a cache what is told of it.
        self.cache = SimpleNamespace(
            block_format=SimpleNamespace(block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=1, block_bytes=1)
        )
        # Nothing is launched ahead.
        self.oldest = None
        self._rows: dict[int, _Row] = {}
        self._free_at = 0.0
        self._entry = Entry(0, 0.0)

    def begin_epoch(self, epoch: int) -> None:
        """Forgets the sequences of the epoch before."""
        self.epoch = epoch
        self.forget()

    def forget(self) -> None:
        """Forgets every sequence."""
        self._rows.clear()

    def finish_all(self) -> list[tuple[Step, StepResult]]:
        """Finishes nothing: every step is finished when it is submitted."""
        return []

    def submit(self, step: Step, arrival: float) -> list[tuple[Step, StepResult]]:
        """Sleeps, and gives each sequence that is due a token."""
        begin = time.thread_time()
        result = self._execute(step)
        self._free_at = max(arrival, self._free_at) + self._step_seconds
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        num_steps, seconds = self._entry
        self._entry = Entry(num_steps + 1, seconds + time.thread_time() - begin)
        _LEDGER.pack_into(self._ledger, 0, *self._entry)
        return [(step, result)]

    def is_silent(self, step: Step, result: StepResult) -> bool:
        """Returns whether nobody waits for the answer to a step: a worker that is alone always answers."""
        return False

    def _execute(self, step: Step) -> StepResult:
        for sequence_id in step.finished_sequence_ids:
            self._rows.pop(sequence_id, None)
        for new in step.new_sequences:
            row = _Row(len(new.token_ids), new.num_computed_tokens, new.sequence_id)
            self._rows[new.sequence_id] = row
        counts = zip(step.sequence_ids, step.num_new_tokens.tolist(), strict=True)
        sampled = tuple(sequence_id for sequence_id, count in counts if self._rows[sequence_id].advance(count))
        token_ids = tuple(self._rows[sequence_id].token_id for sequence_id in sampled)
        times = StepTimes(forward_seconds=self._step_seconds)
        return StepResult(step.epoch, step.step_id, sampled, token_ids, times=times)


class SleepingWorker(Worker):
    """A worker that has no model, and opens its streams on another executor."""

    def __init__(self, executor: SleepingExecutor) -> None:
        super().__init__(num_threads=1)
        self._sleeper: Any = executor

    async def init_device(
        self, device_type: str, dtype: torch.dtype | None, configuration_digest: str, parallel: Parallel = ALONE
    ) -> None:
        """Has none."""
        self.set_up = SetUp(configuration_digest, DeviceChoice(torch.device("cpu"), dtype, 0))

    async def load_model(
        self,
        model: str,
        revision: str,
        on_progress: Callable[[int, int], None],
        quantization: str = "none",
        load_format: str = "auto",
        lora_limits: LoraLimits = NO_LORAS,
    ) -> LoadedModel:
        """Reads what the model is called."""
        folder = resolve_model(model, revision, "config")
        config = json.loads((folder / "config.json").read_text())
        config = SimpleNamespace(
            architecture="Sleeping", vocab_size=config["vocab_size"], max_model_len=MAX_MODEL_LEN, dtype=torch.float32
        )
        loaded = SimpleNamespace(
            config=config,
            model_digest=model_digest(folder),
            weights_digest="",
            parameter_bytes=1,
            quantization=quantization,
            version="",
            model=SimpleNamespace(config=SimpleNamespace(windows=()), share=SimpleNamespace(layers=range(1))),
        )
        self.set_up = replace(self.set_up, loaded=cast("LoadedModel", loaded))
        return cast("LoadedModel", loaded)

    async def determine_num_available_blocks(self, request: ProfileRequest) -> CachePlan:
        """Has as many as are asked for."""
        usage = Usage(0, 0, 0, 0, 0)
        return CachePlan(request.block_size or BLOCK_SIZE, 1, 1, 0, 0, 0, usage)

    async def initialize_cache(self, request: CacheRequest) -> CacheFacts:
        """Allocates nothing."""
        cache = CacheFacts(request, 1, "sleeping", batch_invariant=True)
        self.set_up = replace(self.set_up, cache=cache, executor=self._sleeper)
        gc.collect()
        gc.freeze()
        return cache


def main() -> None:
    """The program."""
    step_seconds, ledger, *flags = sys.argv[1:]
    configuration = load(WorkerConfiguration, "sleeping_worker", "Sleeps.", flags)
    executor = SleepingExecutor(float(step_seconds), Path(ledger))
    # The server makes its worker itself.
    cast("Any", server).Worker = lambda **_: SleepingWorker(executor)
    run_process("worker", configuration, server.serve)


if __name__ == "__main__":
    main()
