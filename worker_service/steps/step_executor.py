"""Executes steps in the device thread: check, change rows, move blocks, compute, sample.

An invalid step changes nothing. A step that fails half-way ends its epoch, and the epoch's state is dropped. On an
asynchronous device a step is launched and finished in two halves, and the next step is launched in between: then its
lengths are known, but not its tokens. Owns the identity of the running epoch. Knows no messages and no streams.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from worker_service.device.memory import ends_device
from worker_service.runner.model_runner import ModelRunner, RunnerOutput
from worker_service.sampling.sampler import Sampled
from worker_service.step import Step, StepOutput, StepTimes
from worker_service.steps.new_sequences import reject_wrong
from worker_service.steps.step_results import make_result
from worker_service.steps.validation import check_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from blockyard_kernels.decoding import DecodeRows
    from blockyard_kernels.launching import Launched
    from worker_service.batch.forward_batch import ForwardBatch, LateRows
    from worker_service.batch.input_batch import InputBatch
    from worker_service.cache_engine import CacheEngine
    from worker_service.steps.rank_steps import RankSteps
    from worker_service.steps.steady import SteadySteps

log = EventLogger(__name__)


@dataclass(frozen=True, slots=True)
class _LaunchedStep:
    """A step between its halves. `begin`: when it left the queue, by the executor's clock."""

    step: Step
    forward_batch: ForwardBatch
    late: LateRows
    launched: Launched
    times: StepTimes
    begin: float


class StepExecutor:
    """The rows, the blocks and the network of one worker, under one epoch at a time."""

    def __init__(
        self,
        batch: InputBatch,
        cache: CacheEngine,
        runner: ModelRunner,
        ranks: RankSteps | None = None,
        fingerprint: str = "",
        clock: Callable[[], float] = time.perf_counter,
        steady: SteadySteps | None = None,
    ) -> None:
        """`ranks`: the steps of this rank; None for a single worker. `fingerprint`: that of the network, in hex.

        `steady`: the loop of its steady steps; None: it has none.
        """
        self._clock = clock
        self.batch = batch
        self.cache = cache
        self.fingerprint = fingerprint
        self.runner = runner
        self._ranks = ranks
        self.steady = steady
        self.epoch = 0
        self._last_step_id = 0
        self._refused: int | None = None
        # The ranks of a group finish a step before they begin the next one.
        self._depth = 1 if ranks is not None else runner.depth
        self._launched: deque[_LaunchedStep] = deque()
        self._last_finished_at = 0.0
        self.num_late_steps = 0
        """The number of steps that were launched behind an unfinished step."""
        self.record: Callable[[Step, float, StepTimes], None] | None = None
        """Takes each executed step, and when it left the queue by the clock, while a profile is recorded."""

    @property
    def num_captured_bytes(self) -> int:
        return self.runner.num_captured_bytes

    def begin_epoch(self, epoch: int) -> None:
        """Forgets the sequences of the epoch before and expects step 1 of this one."""
        self.forget()
        self.epoch, self._last_step_id, self._refused = epoch, 0, None
        if self._ranks is not None:
            self._ranks.begin_epoch(epoch)
            self.runner.join(self._ranks.ranks)

    def forget(self) -> None:
        """Drops every sequence and all launched steps. The contents of blocks stay until they are overwritten."""
        self.wait()
        self._launched.clear()
        self.batch.clear()
        self.runner.slots.clear()

    def prepare(self, step: Step) -> None:
        """Begins preparations for a step that need no device, such as compiling grammars. Any thread may call it."""
        if self.batch.grammars is not None:
            for sequence in step.new_sequences:
                if sequence.sampling.grammar:
                    self.batch.grammars.prepare(sequence.sampling.grammar)

    def steady_rows(self, step: Step) -> DecodeRows | None:
        """Returns the rows for a loop that begins with this step; None: the step must be executed here."""
        is_due = step.epoch == self.epoch and step.step_id == self._last_step_id + 1
        if not is_due or self._refused is not None or self.record is not None:
            return None
        return self.batch.steady_rows(step.sequence_ids, self.cache.num_device_blocks)

    def go_on_behind(self, step_id: int) -> int:
        """Takes note of the last step that the loop has run."""
        self._last_step_id = step_id
        return step_id

    def submit(self, step: Step, arrival: float) -> list[tuple[Step, StepOutput]]:
        """Executes a step, or launches it behind others. Returns the answers of all steps finished by now, in order.

        Args: as in `execute`.
        """
        if self._depth == 1:
            return [(step, self.execute(step, arrival))]
        finished = self.finish_ready()
        if step.forks or step.input_sequence_ids:
            finished += self.finish_all()
        while len(self._launched) >= self._depth:
            finished.append(self._finish_first())
        begin = self._clock()
        times = StepTimes(queue_seconds=begin - arrival)
        try:
            step = self._check(step)
            self._apply(step)
            if not self.batch.must_wait(step):
                self._launched.append(self._launch(step, times, begin))
                return finished
            finished += self.finish_all()
            return [*finished, (step, self._compute(step, times))]
        except Exception as error:  # noqa: BLE001 - becomes a refusal
            refusal = self._explain(step, error)
        return [*finished, *self.finish_all(), (step, self._refuse(step, refusal, times))]

    @property
    def launches_ahead(self) -> bool:
        """Whether steps are launched behind unfinished ones."""
        return self._depth > 1

    @property
    def oldest(self) -> Launched | None:
        """The launched step that will be ready next."""
        return self._launched[0].launched if self._launched else None

    def finish_ready(self) -> list[tuple[Step, StepOutput]]:
        """Finishes launched steps as far as they are ready."""
        finished: list[tuple[Step, StepOutput]] = []
        while self._launched and self._launched[0].launched.is_ready:
            finished.append(self._finish_first())
        return finished

    def finish_all(self) -> list[tuple[Step, StepOutput]]:
        return [self._finish_first() for _ in range(len(self._launched))]

    def wait(self) -> None:
        """Waits until nothing runs on the device; finishes nothing."""
        for each in self._launched:
            # An error is reported when the step is finished.
            with suppress(Exception):
                each.launched.wait()

    def _launch(self, step: Step, times: StepTimes, begin: float) -> _LaunchedStep:
        self.num_late_steps += bool(self._launched)
        forward_batch = self.batch.make_forward_batch(step)
        launched = self.runner.launch(forward_batch, self.batch, self.cache, step)
        return _LaunchedStep(step, forward_batch, self.batch.advance(forward_batch), launched, times, begin)

    def _finish_first(self) -> tuple[Step, StepOutput]:
        """Waits for the oldest launched step and makes its answer."""
        each = self._launched.popleft()
        step, times = each.step, each.times
        if self._refused is not None:
            return step, self._refuse(step, self._refused_before(), times)
        try:
            token_ids, finite = (results.numpy() for results in each.launched.wait())
            failed = ~finite | (token_ids < 0)
            skipped = self.batch.settle(each.late, token_ids, failed)
        except Exception as error:  # noqa: BLE001 - becomes a refusal
            return step, self._refuse(step, self._explain(step, error), times)
        now = self._clock()
        times.begun_at = max(each.begin, self._last_finished_at)
        times.forward_seconds, self._last_finished_at = now - times.begun_at, now
        sampled = Sampled(token_ids, failed & ~skipped, np.zeros_like(failed), finite=finite)
        result = make_result(step, each.forward_batch, RunnerOutput(sampled), times, skipped)
        if self.record is not None:
            self.record(step, each.begin, times)
        return step, result

    def execute(self, step: Step, arrival: float) -> StepOutput:
        """Executes a step, or answers why not. An unexpected error refuses this step and all later ones.

        Raises no `Exception`; an error after which the GPU can compute nothing more is a SystemExit.

        Args:
            step: not checked yet.
            arrival: the time at which the step arrived, by the clock.
        """
        begin = self._clock()
        times = StepTimes(queue_seconds=begin - arrival)
        try:
            step = self._check(step)
            result = self._execute_as_rank(step, times)
            if self.record is not None:
                self.record(step, begin, times)
            return result
        except Exception as error:  # noqa: BLE001 - becomes a refusal
            refusal = self._explain(step, error)
        return self._refuse(step, refusal, times)

    def _explain(self, step: Step, error: Exception) -> BlockyardError:
        """Turns an exception into the refusal of a step."""
        if isinstance(error, BlockyardError):
            return error
        log.exception("a step failed", epoch=step.epoch, step_id=step.step_id)
        if ends_device(error):
            # The supervisor starts a worker that can compute, and its requests go on there.
            raise SystemExit("the GPU can compute nothing more in this process") from error
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        return BlockyardError(Reason.BUG, f"step {step.step_id} failed unexpectedly: see the worker's log")

    def is_silent(self, step: Step, result: StepOutput) -> bool:
        """Returns whether the answer to a step is not sent."""
        return result.refusal is None and self._ranks is not None and self._ranks.is_silent(step)

    def _check(self, step: Step) -> Step:
        """Returns the step with invalid new sequences rejected; raises the error with which the step is refused."""
        if self._refused is not None:
            raise self._refused_before()
        if step.epoch != self.epoch:
            raise BlockyardError(Reason.WRONG_STATE, f"epoch {step.epoch} came while epoch {self.epoch} runs")
        if step.step_id != self._last_step_id + 1:
            message = f"step {step.step_id} came where step {self._last_step_id + 1} of epoch {self.epoch} is due"
            raise BlockyardError(Reason.WRONG_STATE, message)
        if step.decode_error is not None:
            raise step.decode_error
        step, cache = reject_wrong(step, self.batch.limits, self.runner.slots), self.cache
        if error := check_step(step, self.batch, cache.num_device_blocks, cache.num_host_blocks, self.runner.slots):
            raise error
        return step

    def _refused_before(self) -> BlockyardError:
        return BlockyardError(Reason.WRONG_STATE, f"step {self._refused} of epoch {self.epoch} was refused")

    def _refuse(self, step: Step, refusal: BlockyardError, times: StepTimes) -> StepOutput:
        if self._refused is None:
            self._refused = step.step_id
            log.error("a step was refused", epoch=step.epoch, step_id=step.step_id, reason=str(refusal))
            if self._ranks is not None:
                self._ranks.on_refusal(refusal)
        return StepOutput(step.epoch, step.step_id, refusal=refusal, times=times)

    def _execute_as_rank(self, step: Step, times: StepTimes) -> StepOutput:
        if self._ranks is None:
            return self._execute(step, times)
        return self._ranks.run(step, lambda: self._execute(step, times))

    def _execute(self, step: Step, times: StepTimes) -> StepOutput:
        """Executes a checked step, in this order."""
        self._apply(step)
        return self._compute(step, times)

    def _apply(self, step: Step) -> None:
        """Makes the changes of a checked step to slots and rows."""
        self._last_step_id = step.step_id
        if step.activated_lora_ids.size:
            self.runner.slots.activate(step)
        self.batch.apply(step)

    def _compute(self, step: Step, times: StepTimes) -> StepOutput:
        """Executes a step whose changes to rows are made."""
        started = self._clock()
        forward_batch = self.batch.make_forward_batch(step)
        resolved = self._clock()
        self.cache.transfer(step, forward_batch)
        moved = self._clock()
        if self._ranks is not None:
            self._ranks.on_inputs(step, forward_batch)
        planned = self._clock()
        output = self.runner.run(forward_batch, self.batch, self.cache.device_pool)
        if self._ranks is not None:
            self._ranks.on_outputs(forward_batch, output)
        sampled = output.sampled
        self.batch.commit(forward_batch, sampled.token_ids, sampled.failed, sampled.counts)
        if (starts_over := sampled.starts_over) is not None:
            # Wrong drafts may have written keys and values that are not finite, which spoil even rows that mask them.
            self.cache.clear_slots(*self.batch.find_slots(forward_batch, starts_over))
        self.batch.end(forward_batch.layout.beams.rows[output.candidates.failed])
        self.batch.end(forward_batch.pooled_rows)
        times.begun_at = started
        times.cache_operations_seconds = moved - resolved
        times.forward_seconds = resolved - started + planned - moved + output.forward_seconds
        times.sample_seconds = output.sample_seconds
        return make_result(step, forward_batch, output, times)
