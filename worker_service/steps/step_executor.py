"""Executes steps in the device thread: check, change rows, move blocks, compute, sample.

A step that is wrong changes nothing; one that breaks half-way ends its epoch, and with it all that it changed. Owns the
identity of the epoch that runs. Knows no messages and no streams.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from worker_service.step import Step, StepResult, StepTimes
from worker_service.steps.validation import check_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_service.batch.input_batch import InputBatch
    from worker_service.batch.row_requests import RowRequests
    from worker_service.batch.step_layout import StepLayout
    from worker_service.cache_engine import CacheEngine
    from worker_service.model_runner import ModelRunner, RunnerOutput
    from worker_service.sampling.sampler import Candidates, Sampled
    from worker_service.steps.rank_steps import RankSteps

log = EventLogger(__name__)


class Recorder(Protocol):
    """Takes note of the steps that are executed."""

    def record(self, step: Step, begin: float, times: StepTimes) -> None:
        """Takes a step that was just executed. `begin`: when it left the queue, by time.perf_counter()."""
        ...


class StepExecutor:
    """The rows, the blocks and the network of one worker, under one epoch at a time."""

    def __init__(
        self, batch: InputBatch, cache: CacheEngine, runner: ModelRunner, ranks: RankSteps | None = None
    ) -> None:
        """`ranks`: of a worker whose replica has others."""
        self.batch = batch
        self.cache = cache
        self._runner = runner
        self._ranks = ranks
        self._epoch = 0
        self._last_step_id = 0
        self._refused: int | None = None
        # Only while an operator records a profile.
        self.recorder: Recorder | None = None

    def begin_epoch(self, epoch: int) -> None:
        """Forgets the sequences of the epoch before and expects step 1 of this one."""
        self.forget()
        self._epoch, self._last_step_id, self._refused = epoch, 0, None
        if self._ranks is not None:
            self._ranks.begin_epoch(epoch)
            self._runner.join(self._ranks.ranks)

    def forget(self) -> None:
        """Forgets every sequence. What their blocks hold stays until it is written over."""
        self.batch.clear()

    def execute(self, step: Step, arrival: float) -> StepResult:
        """Executes a step, or answers why not. Never raises: an unexpected error refuses this step and all later ones.

        Args:
            step: not checked yet.
            arrival: when it came, by time.perf_counter().
        """
        begin = time.perf_counter()
        times = StepTimes(queue_seconds=begin - arrival)
        try:
            refusal = self._find_refusal(step)
            if refusal is None:
                result = self._execute_as_rank(step, times)
                if self.recorder is not None:
                    self.recorder.record(step, begin, times)
                return result
        except BlockyardError as error:
            refusal = error
        except Exception as error:
            log.exception("a step failed", epoch=step.epoch, step_id=step.step_id)
            refusal = BlockyardError(Reason.BUG, f"step {step.step_id} failed unexpectedly: see the worker's log")
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        return self._refuse(step, refusal, times)

    def is_silent(self, step: Step, result: StepResult) -> bool:
        """Returns whether nobody waits for the answer to a step."""
        return result.refusal is None and self._ranks is not None and self._ranks.is_silent(step)

    def _find_refusal(self, step: Step) -> BlockyardError | None:
        if self._refused is not None:
            return BlockyardError(Reason.WRONG_STATE, f"step {self._refused} of epoch {self._epoch} was refused")
        if step.epoch != self._epoch:
            return BlockyardError(Reason.WRONG_STATE, f"epoch {step.epoch} came while epoch {self._epoch} runs")
        if step.step_id != self._last_step_id + 1:
            message = f"step {step.step_id} came where step {self._last_step_id + 1} of epoch {self._epoch} is due"
            return BlockyardError(Reason.WRONG_STATE, message)
        return step.decode_error or check_step(
            step, self.batch, self.cache.num_device_blocks, self.cache.num_host_blocks
        )

    def _refuse(self, step: Step, refusal: BlockyardError, times: StepTimes) -> StepResult:
        if self._refused is None:
            self._refused = step.step_id
            log.error("a step was refused", epoch=step.epoch, step_id=step.step_id, reason=str(refusal))
            if self._ranks is not None:
                self._ranks.on_refusal(refusal)
        return StepResult(step.epoch, step.step_id, refusal=refusal, times=times)

    def _execute_as_rank(self, step: Step, times: StepTimes) -> StepResult:
        if self._ranks is None:
            return self._execute(step, times)
        return self._ranks.run(step, lambda: self._execute(step, times))

    def _execute(self, step: Step, times: StepTimes) -> StepResult:
        """Executes a checked step, in this order."""
        self._last_step_id = step.step_id
        self.batch.apply(step)
        started = time.perf_counter()
        self.cache.transfer(step.blocks_to_swap_out, step.blocks_to_swap_in, step.blocks_to_copy)
        moved = time.perf_counter()
        forward_batch = self.batch.make_forward_batch(step)
        if self._ranks is not None:
            self._ranks.on_inputs(step, forward_batch)
        planned = time.perf_counter()
        output = self._runner.run(forward_batch, self.batch, self.cache.device_pool)
        if self._ranks is not None:
            self._ranks.on_outputs(forward_batch, output)
        self.batch.commit(forward_batch, output.sampled.token_ids, output.sampled.failed)
        self.batch.end(forward_batch.layout.beams, output.candidates.failed)
        times.begun_at = started
        times.cache_operations_seconds = moved - started
        times.forward_seconds = planned - moved + output.forward_seconds
        times.sample_seconds = output.sample_seconds
        return _make_result(step, forward_batch.layout, output, times)


def _make_result(step: Step, layout: StepLayout, output: RunnerOutput, times: StepTimes) -> StepResult:
    sampled, candidates = output.sampled, output.candidates
    sequence_ids, token_ids, beam_ids = layout.sampled.sequence_ids, sampled.token_ids, layout.beams.sequence_ids
    failures: tuple[tuple[int, BlockyardError], ...] = ()
    if np.count_nonzero(sampled.failed) or np.count_nonzero(candidates.failed):
        failures = (*_failures(layout.sampled, sampled), *_failures(layout.beams, candidates))
        sequence_ids, token_ids = layout.sampled.ids(~sampled.failed), token_ids[~sampled.failed]
        beam_ids = layout.beams.ids(~candidates.failed)
    return StepResult(
        step.epoch,
        step.step_id,
        sequence_ids,
        tuple(token_ids.tolist()),
        layout.skipped_ids,
        failures,
        logprob_sequence_ids=layout.sampled.ids(sampled.has_logprobs),
        logprobs=sampled.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        beam_sequence_ids=beam_ids,
        beam_candidates=candidates.logprobs,
        times=times,
    )


def _failures(requests: RowRequests, output: Sampled | Candidates) -> Iterator[tuple[int, BlockyardError]]:
    """Gives each row that failed its error."""
    if not np.count_nonzero(output.failed):
        return
    for sequence_id in requests.ids(output.failed & ~output.finite):
        message = "the model's logits are not finite numbers: its weights may be damaged, or too large for its dtype"
        yield sequence_id, BlockyardError(Reason.NOT_FINITE, message)
    for sequence_id in requests.ids(output.failed & output.finite):
        message = "no token is possible here: what the request allows, forbids and needs before it may end excludes all"
        yield sequence_id, BlockyardError(Reason.NO_TOKEN_POSSIBLE, message)
