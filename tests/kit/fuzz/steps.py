"""ExecuteModelResponse into the scheduler's codec and core, over its step stream; ExecuteModelRequest into a worker."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from blockyard.common.v1 import sampling_pb2
from blockyard.contract.codec.progress import encode_progress
from blockyard.contract.sampling import BeamSearch
from blockyard.contract.scheduling import Progress
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.config import StepMismatch
from scheduler_service.core.scheduler import CoreConfig, Scheduler
from scheduler_service.core.sequence import Group
from scheduler_service.core.values import GroupSpec
from scheduler_service.replicas import codec as scheduler_codec
from scheduler_service.replicas.steps.answer_checks import AnswerLimits, WrongAnswer
from scheduler_service.replicas.worker_link import StepCall, StepStream
from tests.kit.fuzz.mutations import mutate
from tests.kit.kernels.tiny_models import tiny_model
from worker_service import codec as worker_codec
from worker_service.batch.input_batch import InputBatch
from worker_service.batch.rows import BatchLimits
from worker_service.cache_engine import BlockFormat, CacheEngine
from worker_service.drafting.drafter import Drafter
from worker_service.models.loader import load_model
from worker_service.runner.model_runner import ModelRunner
from worker_service.steps.step_executor import StepExecutor

if TYPE_CHECKING:
    from random import Random

    from scheduler_service.core.values import SchedulerOutput
    from tests.kit.fuzz.report import Report

CONFIG = CoreConfig(
    block_size=8,
    num_device_blocks=40,
    num_host_blocks=16,
    max_model_len=96,
    max_num_seqs=8,
    max_num_batched_tokens=48,
    max_draft_tokens=3,
    max_draft_rows=8,
)
VOCAB_SIZE = 64
DRAFTS = CONFIG.max_draft_tokens, CONFIG.max_draft_rows
LIMITS = AnswerLimits(VOCAB_SIZE, CONFIG.max_model_len, CONFIG.max_rows, *DRAFTS)
NUM_LIVE = 6


class Requests:
    """Keeps some requests live at a core."""

    def __init__(self, rng: Random) -> None:
        self.scheduler = Scheduler(CONFIG)
        self._rng = rng
        self._num_added = 0

    def fill(self) -> None:
        """Adds what is missing."""
        while len(self.scheduler._groups) < NUM_LIVE:
            self._num_added += 1
            self.scheduler.adopt([self._make()])
        self.scheduler.take_ended()

    def _make(self) -> Group:
        rng = self._rng
        beams = BeamSearch(rng.choice((2, 3))) if rng.random() < 0.2 else None
        n = rng.choice((1, 1, 2)) if beams is None or beams.width > 1 else 1
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 5, 30, 60))))
        payload = sampling_pb2.SamplingParams(temperature=0.0, seed=self._num_added, logprobs=2).SerializeToString()
        stop = frozenset({VOCAB_SIZE - 1})
        spec = GroupSpec(f"r{self._num_added}", "o", prompt, n, 30, 0, stop, payload=payload, beams=beams)
        return Group(spec, 100 * self._num_added, CONFIG.fit(spec), float(self._num_added))

    def start_over(self) -> None:
        """The worker is lost."""
        for group, _ in self.scheduler.evacuate():
            self.scheduler.adopt([group])
        self.scheduler.check_integrity()


class _Call:
    """Both ends of a stream: what is read is what was put there."""

    answer: Any = None

    async def read(self) -> Any:
        return self.answer


def _right_answer(scheduler: Scheduler, epoch: int, rng: Random) -> worker_pb2.ExecuteModelResponse:
    """What a worker could answer to the oldest step."""
    step = scheduler._in_flight[0]
    answer = worker_pb2.ExecuteModelResponse(epoch=epoch, step_id=step.step_id, sequence_ids=step.sampled_ids)
    allowances = step.drafts or (0,) * len(step.sampled)
    counts = [1 + rng.randint(0, allowance) for allowance in allowances]
    if any(count > 1 for count in counts):
        answer.num_tokens.extend(counts)
        answer.num_draft_tokens = answer.num_accepted_tokens = sum(counts) - len(counts)
    answer.token_ids.extend(rng.randrange(VOCAB_SIZE) for _ in range(sum(counts)))
    answer.times.forward.nanos = answer.times.queue.nanos = 10**6
    if step.sampled_ids:
        for sequence_id, count in zip(step.sampled_ids, counts, strict=True):
            answer.logprob_sequence_ids.extend([sequence_id] * count)
        _add_entries(answer.logprobs, sum(counts), 3, rng, ranks=True)
    for sequence, _ in step.pieces[:2]:
        piece = answer.prompt_logprobs.add(sequence_id=sequence.sequence_id, first_position=1)
        _add_entries(piece.logprobs, 2, 2, rng, ranks=True)
    if step.beams:
        answer.beam_sequence_ids.extend(beam.sequence_id for beam in step.beams)
        num_candidates = step.beams[0].group.spec.num_beam_candidates
        _add_entries(answer.beam_candidates, len(step.beams), num_candidates, rng, ranks=False)
    return answer


def _add_entries(columns: Any, num_entries: int, num_candidates: int, rng: Random, *, ranks: bool) -> None:
    for _ in range(num_entries):
        columns.num_candidates.append(num_candidates)
        columns.token_ids.extend(rng.sample(range(VOCAB_SIZE), num_candidates))
        columns.logprobs.extend(sorted((-rng.random() for _ in range(num_candidates)), reverse=True))
        if ranks:
            columns.ranks.extend(range(1, 1 + num_candidates))


async def fuzz_answers(report: Report) -> None:
    """Answers of workers, changed."""
    rng, call = report.rng, _Call()
    requests = Requests(rng)
    scheduler, epoch = requests.scheduler, 1
    stream = StepStream(StepCall(call), epoch, LIMITS)
    for _ in range(report.num_cases):
        requests.fill()
        while len(scheduler._in_flight) < 2 and scheduler.schedule():
            pass
        changed = mutate(_right_answer(scheduler, epoch, rng), rng)
        call.answer = changed
        was_lost = True
        with report.case(may_be_bug=True):
            result = await stream.receive()
            try:
                updates = scheduler.update(result)
            except StepMismatch as error:
                raise WrongAnswer(str(error)) from None
            for update in updates.values():
                encode_progress(Progress(update=update)).SerializeToString()
            assert all(0 <= token_id < VOCAB_SIZE for update in updates.values() for token_id in update.token_ids)
            assert math.isfinite(result.forward_seconds + result.cache_seconds)
            scheduler.check_integrity()
            was_lost = False
        if was_lost:
            requests.start_over()
            epoch += 1
            stream = StepStream(StepCall(call), epoch, LIMITS)


class _Worker:
    """A worker's device thread, without the thread: a tiny model and its pools."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.loaded = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), lambda done, total: None)
        self.executor = self._make_executor()

    def _make_executor(self) -> StepExecutor:
        loaded = self.loaded
        block_format = BlockFormat.of(loaded.model, CONFIG.block_size)
        cache = CacheEngine(block_format, CONFIG.num_device_blocks, CONFIG.num_host_blocks, loaded.backend)
        cache.device_pool.zero_()
        limits = BatchLimits(
            CONFIG.max_model_len,
            CONFIG.max_num_seqs,
            CONFIG.block_size,
            loaded.config.vocab_size,
            CONFIG.max_num_batched_tokens,
            max_draft_tokens=CONFIG.max_draft_tokens,
            max_draft_rows=CONFIG.max_draft_rows,
        )
        batch = InputBatch(limits, drafter=Drafter(loaded.backend.drafting))
        return StepExecutor(batch, cache, ModelRunner(loaded))

    def take(self, message: worker_pb2.ExecuteModelRequest) -> worker_pb2.ExecuteModelResponse:
        """Answers a step; raises its refusal."""
        step = worker_codec.decode_step(message, CONFIG.max_num_seqs)
        result = self.executor.execute(step, 0.0)
        if result.refusal is not None:
            raise result.refusal
        return worker_codec.encode_result(result)


async def fuzz_steps(report: Report) -> None:
    """Steps of schedulers, changed, each the second or third of its epoch."""
    worker, rng = _Worker(), report.rng
    requests = Requests(rng)
    scheduler = requests.scheduler
    num_cases, epoch = 0, 0
    while num_cases < report.num_cases:
        epoch += 1
        worker.executor.begin_epoch(epoch)
        requests.start_over()
        for group in list(scheduler._groups.values()):
            scheduler.abort(group.spec.request_id)
        requests.fill()
        for _ in range(rng.choice((0, 1, 2, 3))):
            if output := scheduler.schedule():
                answer = worker.take(_encode(output, epoch))
                scheduler.update(scheduler_codec.decode_answer(answer, LIMITS._replace(vocab_size=2**31)))
        output = scheduler.schedule()
        if output is None:
            continue
        message = _encode(output, epoch)
        # The first that is not refused ends the turn: it has changed what the worker holds.
        for _ in range(8):
            num_cases += 1
            changed = mutate(message, rng)
            if changed is None:
                report.outcomes["no message"] += 1
                continue
            worker.executor._refused = None
            before = report.outcomes["taken"]
            with report.case():
                worker.take(changed)
            if report.outcomes["taken"] > before or report.surprises:
                break


def _encode(output: SchedulerOutput, epoch: int) -> worker_pb2.ExecuteModelRequest:
    return scheduler_codec.encode_step(output, epoch)
