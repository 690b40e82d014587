"""The worker by itself: the steps of a batch, decided beforehand and queued all at once, in a process of their own.

The scheduler's decisions do not depend on which tokens are sampled when nothing stops a request but its length. So they
are made before the clock starts, and the worker never waits: what is measured is the worker and nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kit.batch_process import BatchProcess, Line
from blockyard.common.v1 import sampling_pb2
from blockyard.contract.workers import CachePlan, ProfileRequest
from blockyard_kernels.select import KernelChoice
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import GroupSpec, SchedulerOutput, StepResult
from scheduler_service.replicas.codec import encode_step
from worker_service.codec import decode_step
from worker_service.set_up import LoaderOptions
from worker_service.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.kit.workload import Workload
    from worker_service.step import Step

EPOCH = 1
BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class Settings:
    """How the worker is set up, here and in the whole system, by the names of the flags."""

    model: str
    dtype: str = "bfloat16"
    quantization: str = ""
    cpu_kernels: str = "auto"
    num_threads: int = 0
    block_size: int = BLOCK_SIZE
    num_device_blocks: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 4096
    packed_cache: str = ""


class WorkerAlone(BatchProcess):
    """The process, as its user sees it."""

    def __init__(self, settings: Settings) -> None:
        """Starts it. Raises RuntimeError where it ends instead."""
        super().__init__([sys.executable, __file__, json.dumps(asdict(settings))])


# In the process.


class Planner:
    """Decides the steps of batches, one after another, as the scheduler's service would for a worker that is alone."""

    def __init__(self, settings: Settings) -> None:
        self._scheduler = Scheduler(
            CoreConfig(
                block_size=settings.block_size,
                num_device_blocks=settings.num_device_blocks,
                num_host_blocks=0,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
            )
        )
        self._num_requests = 0
        # By sequence id: tokens that are known, and those of them that are computed.
        self._lengths: dict[int, list[int]] = {}

    def plan(self, workload: Workload) -> list[Step]:
        """Decides a whole batch; its steps go on counting where the last batch's ended."""
        for prompt in workload.prompts():
            spec = self._spec(prompt, workload.num_output_tokens)
            self._scheduler.adopt([Group(spec, self._num_requests, self._scheduler.config.fit(spec), 0.0)])
        return [decode_step(encode_step(output, EPOCH)) for output in self._outputs()]

    def _spec(self, prompt: list[int], max_tokens: int) -> GroupSpec:
        self._num_requests += 1
        sampling = sampling_pb2.SamplingParams(temperature=0.0, seed=self._num_requests)
        name = f"request-{self._num_requests}"
        return GroupSpec(name, "", tuple(prompt), 1, max_tokens, 0, frozenset(), payload=sampling.SerializeToString())

    def _outputs(self) -> Iterator[SchedulerOutput]:
        while self._scheduler.can_schedule() and (output := self._scheduler.schedule()) is not None:
            yield output
            self._scheduler.update(self._answer(output))

    def _answer(self, output: SchedulerOutput) -> StepResult:
        """What a worker would say: a token for each sequence of which the step computes the last id."""
        for new in output.new_sequences:
            self._lengths[new.sequence_id] = [len(new.token_ids), new.num_computed_tokens]
        for sequence_id in output.finished_sequence_ids:
            del self._lengths[sequence_id]
        sampled: list[int] = []
        for sequence_id, num_new_tokens in zip(output.sequence_ids, output.num_new_tokens, strict=True):
            lengths = self._lengths[sequence_id]
            lengths[1] += num_new_tokens
            if lengths[0] == lengths[1]:
                lengths[0] += 1
                sampled.append(sequence_id)
        return StepResult(output.step_id, tuple(sampled), (0,) * len(sampled))


async def set_up(settings: Settings) -> Worker:
    """Brings a worker to where it takes steps, by the same calls as its servicer."""
    worker = Worker(
        num_threads=settings.num_threads, load_options=LoaderOptions(KernelChoice(cpu=settings.cpu_kernels))
    )
    worker.start()
    await worker.init_device("cpu", getattr(torch, settings.dtype), "")
    quantization = {"quantization": settings.quantization} if settings.quantization else {}
    await worker.load_model(settings.model, "main", lambda done, total: None, **quantization)
    limits = (settings.max_num_batched_tokens, settings.max_num_seqs)
    await worker.determine_num_available_blocks(ProfileRequest(settings.block_size, 0.9, 0, *limits))
    await worker.initialize_cache(
        CachePlan(settings.block_size, settings.num_device_blocks, 0, settings.max_model_len, *limits)
    )
    return worker


async def serve(settings: Settings) -> None:
    """Runs a batch for each line, until there is none."""
    line, worker, planner = Line(), await set_up(settings), Planner(settings)
    stream = worker.open_stream()
    answers = stream.answers()
    loaded = worker.set_up.loaded
    assert loaded is not None
    line.say(device=worker.device_name, kernels=loaded.backend.name)
    while (workload := await asyncio.to_thread(line.read)) is not None:
        steps, num_tokens = planner.plan(workload), 0
        begin = time.perf_counter()
        for step in steps:
            stream.submit(step)
        for _ in steps:
            result = await anext(answers)
            assert result.refusal is None, result.refusal
            num_tokens += len(result.token_ids)
        seconds = time.perf_counter() - begin
        assert num_tokens == workload.num_tokens, (num_tokens, workload)
        line.say(seconds=seconds)
    await worker.stop(5.0)


def main() -> None:
    """The process's program: the settings as JSON are its only argument."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", help="Settings as JSON")
    sys.setswitchinterval(1e-4)
    asyncio.run(serve(Settings(**json.loads(parser.parse_args().settings))))


if __name__ == "__main__":
    main()
