"""The master oracle on one device, small: requests run alone, then in every other way.

They go through the scheduler's core and a worker in this process: neither a gateway nor a socket is needed, so that it
runs wherever torch does. Whoever wants more has `tests/integration/test_master_oracle.py`: the three real services.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.workers import NO_LORAS, CachePlan, LoraLimits
from blockyard_kernels.select import KernelChoice
from scheduler_service.core.config import CoreConfig
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.values import GroupSpec, LoraSpec
from scheduler_service.replicas.codec import decode_answer, encode_step
from scheduler_service.replicas.steps.answer_checks import AnswerLimits
from tests.kit.oracles.core_requests import add_request
from worker_service.codec import decode_step, encode_result
from worker_service.lora.adapter import LoraRequest
from worker_service.set_up import LoaderOptions
from worker_service.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Self

    import torch

BLOCK_SIZE = 16
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 400, 100
MAX_LEN, MAX_SEQS, MAX_TOKENS = 256, 16, 256
MAX_RANK = 8
OWNER = "oracle"
TORCH = KernelChoice(cpu="reference", gpu="reference")
# A stuck schedule ends here, and says so.
MAX_STEPS = 5000

Answers = dict[str, list[list[int]]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way of running requests. `kill_after`: the worker's state is lost after so many steps, again and again."""

    name: str
    num_device_blocks: int = NUM_DEVICE_BLOCKS
    num_host_blocks: int = 0
    max_prefill_chunk: int = 0
    preemption_mode: str = "recompute"
    kill_after: int = 0
    depth: int = 2


WAYS = (
    Way("batch"),
    Way("chunks", max_prefill_chunk=16),
    Way("swap", num_device_blocks=24, num_host_blocks=NUM_HOST_BLOCKS, preemption_mode="swap"),
    Way("preempt", num_device_blocks=24),
    Way("kill", kill_after=7),
)


@dataclass(slots=True)
class Run:
    """What came of it."""

    answers: Answers = field(default_factory=dict)
    num_steps: int = 0
    num_kills: int = 0
    num_preemptions: int = 0
    num_swapped_blocks: int = 0
    num_prefill_pieces: int = 0


class OracleWorker:
    """A worker in this process, with the pools of the largest way."""

    def __init__(
        self,
        device: str,
        model: str,
        dtype: torch.dtype,
        load_format: str = "auto",
        kernels: KernelChoice = TORCH,
        adapters: Sequence[Path] = (),
        num_slots: int = 0,
    ) -> None:
        """`adapters`: of one folder, as many as `num_slots` of them at a time; 0: all."""
        self._device = device
        self._adapters = adapters
        self._num_slots = num_slots or len(adapters)
        self.loras: list[LoraSpec] = []
        self._model = model
        self._dtype = dtype
        self._load_format = load_format
        lora_root = adapters[0].parent if adapters else None
        self._worker = Worker(num_threads=1, load_options=LoaderOptions(kernels), lora_root=lora_root)
        self._epoch = 0
        self.is_batch_invariant = False

    async def __aenter__(self) -> Self:
        worker = self._worker
        worker.start()
        await worker.init_device(self._device, self._dtype, "")
        count = len(self._adapters)
        limits = LoraLimits(self._num_slots, MAX_RANK, count) if count else NO_LORAS
        await worker.load_model(self._model, "main", lambda done, total: None, "none", self._load_format, limits)
        sizes = (BLOCK_SIZE, NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS, MAX_LEN, MAX_TOKENS, MAX_SEQS)
        self.is_batch_invariant = (await worker.initialize_cache(CachePlan(*sizes))).batch_invariant
        for lora_id, folder in enumerate(self._adapters, 1):
            adapter = await worker.adapters.add(LoraRequest(lora_id, folder.name, folder.name))
            self.loras.append(LoraSpec(lora_id, bytes.fromhex(adapter.digest), folder.name))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert await self._worker.stop(30), "the device thread did not end"

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        loaded = self._worker.set_up.loaded
        assert loaded is not None
        return loaded.config.vocab_size

    async def run_alone(self, specs: Sequence[GroupSpec]) -> Answers:
        """The truth: each request by itself, with nothing cached."""
        answers: Answers = {}
        for spec in specs:
            answers |= (await self.run([spec], Way("alone", depth=1))).answers
        return answers

    async def run(self, specs: Sequence[GroupSpec], way: Way) -> Run:
        """Runs requests together, to the end."""
        scheduler = Scheduler(
            CoreConfig(
                block_size=BLOCK_SIZE,
                num_device_blocks=way.num_device_blocks,
                num_host_blocks=way.num_host_blocks,
                max_model_len=MAX_LEN,
                max_num_seqs=MAX_SEQS,
                max_num_batched_tokens=MAX_TOKENS,
                max_prefill_chunk=way.max_prefill_chunk,
                preemption_mode=way.preemption_mode,
                max_steps_in_flight=way.depth,
                max_loras=self._num_slots,
                lora_patience_seconds=0.0,
                debug_integrity=True,
            )
        )
        run, sequence_of, first = Run(), dict[int, list[int]](), 1
        for spec in specs:
            add_request(scheduler, spec, first)
            run.answers[spec.request_id] = [sequence_of.setdefault(first + index, []) for index in range(spec.n)]
            first += spec.num_sequence_ids
        while scheduler.has_unfinished():
            assert run.num_steps < MAX_STEPS, f"{way.name} does not come to an end"
            await self._run_epoch(scheduler, way, run, sequence_of)
        stats = scheduler.stats()
        run.num_preemptions, run.num_prefill_pieces = stats.num_preemptions_total, stats.num_prefill_pieces_total
        run.num_swapped_blocks = stats.num_swapped_out_blocks_total
        return run

    async def _run_epoch(self, scheduler: Scheduler, way: Way, run: Run, sequence_of: dict[int, list[int]]) -> None:
        """Runs until all is done, or the worker is to be killed: then what it computed last is not answered."""
        await self._poison()
        self._epoch += 1
        stream = self._worker.open_stream()
        answers, num_open, num_begun = stream.answers(), 0, 0
        limits = AnswerLimits(self.vocab_size, MAX_LEN, MAX_SEQS)
        while scheduler.has_unfinished():
            while scheduler.can_schedule() and (output := scheduler.schedule()) is not None:
                stream.submit(decode_step(encode_step(output, self._epoch)))
                num_open, num_begun, run.num_steps = num_open + 1, num_begun + 1, run.num_steps + 1
            assert num_open, f"{way.name}: nothing runs and nothing can be scheduled"
            if way.kill_after and num_begun > way.kill_after:
                run.num_kills += 1
                scheduler.adopt([group for group, _ in scheduler.evacuate()])
                break
            result = await anext(answers)
            assert result.refusal is None, result.refusal
            num_open -= 1
            for update in scheduler.update(decode_answer(encode_result(result), limits)).values():
                for sequence_id, token_id in zip(update.sequence_ids, update.token_ids, strict=True):
                    sequence_of[sequence_id].append(token_id)
        self._worker.close_stream(stream)

    async def _poison(self) -> None:
        """What an earlier epoch left in the blocks must not matter."""
        executor = self._worker.set_up.executor
        assert executor is not None
        pools = (executor.cache.device_pool, executor.cache.host_pool)

        def fill() -> None:
            for pool in pools:
                pool.fill_(float("nan"))

        await self._worker._thread.run(fill)


def make_requests(
    vocab_size: int, count: int = 12, num_tokens: int = 24, loras: Sequence[LoraSpec] = ()
) -> list[GroupSpec]:
    """Prompts that share beginnings; greedy and sampled, with one and with several answers; with each adapter in turn
    and with none.
    """
    chooser = random.Random(5)
    common = [chooser.randrange(vocab_size) for _ in range(40)]
    specs: list[GroupSpec] = []
    for index in range(count):
        own = [chooser.randrange(vocab_size) for _ in range(chooser.choice((1, 7, 16, 33, 60)))]
        sampling = sampling_pb2.SamplingParams(temperature=float(index % 2), top_p=0.95, seed=index)
        prompt = tuple((common if index % 3 else []) + own)
        spec = GroupSpec(
            f"request-{index}",
            OWNER,
            prompt,
            1 + (index % 4 == 3),
            num_tokens,
            0,
            frozenset(),
            payload=sampling.SerializeToString(),
            lora=[None, *loras][index % (1 + len(loras))],
        )
        specs.append(spec)
    return specs


def differences(answers: Answers, truth: Answers) -> list[str]:
    """Names the sequences that differ, and from which token on."""
    found: list[str] = []
    for request_id, expected in truth.items():
        for index, (ours, theirs) in enumerate(zip(answers[request_id], expected, strict=True)):
            if ours != theirs:
                place = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), -1)
                found.append(f"{request_id}[{index}] from token {place}")
    return found
