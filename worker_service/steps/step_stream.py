"""Queues the steps of epochs for the device thread, and returns their answers in order.

Decides which of the open streams runs. Lives in the event loop. Knows neither the contents nor the encoding of steps.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason
from blockyard.telemetry import EventLogger
from worker_service.device.thread import DeviceThread, StepJob, call_soon
from worker_service.step import Step, StepOutput

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from blockyard_kernels.launching import Launched
    from worker_service.steps.steady import SteadyStep
    from worker_service.steps.step_executor import StepExecutor

    OnStep = Callable[[Step, StepOutput], None]

log = EventLogger(__name__)

# A new epoch is one above the largest epoch that any worker of the replica saw. A number this far ahead is an error:
# taking it would soon use up all numbers.
MAX_EPOCH_JUMP = 2**32


class StepStream:
    """The steps and answers of one epoch. Once stopped, it drops the steps that did not start."""

    def __init__(
        self,
        streams: StepStreams,
        device: DeviceThread,
        executor: StepExecutor,
        on_step: OnStep,
        clock: Callable[[], float],
    ) -> None:
        self.epoch: int | None = None
        self.executor = executor
        self._steady = executor.steady
        self._streams = streams
        self._on_step = on_step
        self._clock = clock
        self._device = device
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[StepOutput | BlockyardError | None] = asyncio.Queue()
        # Written by the device thread: the step that it answered or refused last.
        self._last_step_id = 0
        # Read by the device thread between two steps.
        self.is_stopped = False
        self._watched: Launched | None = None

    @property
    def max_num_seqs(self) -> int:
        return self.executor.batch.limits.max_num_seqs

    def submit(self, step: Step) -> None:
        """Takes a step that has arrived. The first step of a higher epoch ends the stream of the epoch before."""
        if step.new_sequences and log.has_debug:
            _log_new_sequences(step)
        self._streams.submit(self, step)

    def queue(self, step: Step) -> None:
        """Queues a step of the epoch that runs for the device thread."""
        arrival = self._clock()
        self.executor.prepare(step)
        steady = self._steady.read(step, arrival, self._deliver) if self._steady is not None else None
        if steady is None:
            self._device.post(StepJob(lambda: self._run(step, arrival)))
        elif self._steady is not None and not self._steady.push(steady):
            self._device.post(StepJob(lambda: self._run_steadily(steady)))

    def _run(self, step: Step, arrival: float) -> None:
        if not self.is_stopped:
            self._tell(self.executor.submit(step, arrival))
            self._watch()

    def _run_steadily(self, first: SteadyStep) -> None:
        """Runs a step that is like the one before, and those that follow, without Python as far as that goes."""
        left, rows = [first], None
        if not self.is_stopped and self._device.may_wait:
            rows = self.executor.steady_rows(first.step)
        if rows is not None and self._steady is not None:
            self._device.let_go()
            last_step_id, left = self._steady.run(first, rows, lambda: self._device.may_wait)
            self._last_step_id = self.executor.go_on_behind(last_step_id)
        for each in left:
            self._run(each.step, each.arrival)

    def _deliver(self, step: Step, result: StepOutput) -> None:
        self._answers.put_nowait(result)
        self._on_step(step, result)

    def _tell(self, finished: list[tuple[Step, StepOutput]]) -> None:
        for step, result in finished:
            self._last_step_id = step.step_id
            tell = partial(self._tell_one, step, result)
            # A launched step leaves Python to others anyway.
            if self.executor.launches_ahead:
                tell()
            else:
                self._device.hold(tell)

    def _tell_one(self, step: Step, result: StepOutput) -> None:
        if self._steady is not None:
            self._steady.tell(partial(self._deliver, step, result))
            return
        if not self.executor.is_silent(step, result):
            self._queue_answer(result)
        self._on_step(step, result)

    def _watch(self) -> None:
        """Finishes launched steps as soon as they are ready, even if no further step comes."""
        oldest = self.executor.oldest
        if oldest is not None and oldest is not self._watched:
            self._watched = oldest
            self._device.when_ready(oldest, self._finish_ready)

    def _finish_ready(self) -> None:
        if self.executor.epoch == self.epoch:
            self._tell(self.executor.finish_ready())
            self._watch()

    def _finish_all(self) -> None:
        if self.executor.epoch == self.epoch:
            self._tell(self.executor.finish_all())

    def _queue_answer(self, answer: StepOutput | BlockyardError | None) -> None:
        if self._steady is not None:
            self._steady.tell(partial(self._answers.put_nowait, answer))
        else:
            call_soon(self._loop, self._answers.put_nowait, answer)

    def answer(self, result: StepOutput) -> None:
        """Answers a step that does not reach the device thread."""
        self._answers.put_nowait(result)

    def finish(self) -> None:
        """Ends the stream after the waiting steps; no further step is accepted."""
        self._device.post(self._finish_all)
        self._device.post(lambda: self._queue_answer(None))

    def stop(self, error: BlockyardError | None = None) -> None:
        """Ends the stream with `error` after the running step, and drops the waiting ones."""
        if not self.is_stopped:
            self._drop_waiting()
            self._device.post(lambda: self._queue_answer(error))

    def drain(self) -> None:
        """Drops the waiting steps, and reports the drain after the running step; the scheduler closes the stream."""
        self._drop_waiting()
        self._device.post(self._finish_all)
        self._device.post(lambda: self._queue_answer(StepOutput(self.epoch or 0, self._last_step_id, draining=True)))

    def _drop_waiting(self) -> None:
        self.is_stopped = True
        if self._steady is not None:
            self._steady.drop()

    def end(self, error: BlockyardError) -> None:
        """Ends the stream now, even while the device thread runs a step."""
        self._answers.put_nowait(error)

    async def answers(self) -> AsyncIterator[StepOutput]:
        """Returns the answers in order; raises the error that the stream was ended with."""
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer


class StepStreams:
    """All open streams of a worker. The one whose first step had the highest epoch runs."""

    def __init__(
        self,
        device: DeviceThread,
        on_step: OnStep = lambda step, result: None,
        on_epoch: Callable[[int], None] = lambda epoch: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Calls `on_step` after the answer to each step is queued, and `on_epoch` when an epoch begins.

        All calls of `on_step` come from one thread: the event loop's for an executor with steady steps, else the
        device's. `clock`: that of the executor.
        """
        self.epoch = 0
        self._clock = clock
        self._device = device
        self._on_step = on_step
        self._on_epoch = on_epoch
        # In the order in which they were opened.
        self._open: dict[StepStream, None] = {}
        self._running: StepStream | None = None
        self._all_closed = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def open(self, executor: StepExecutor) -> StepStream:
        """Opens a stream. Its first step decides whether it runs: see `StepStream.submit`."""
        executor.runner.on_compute = self._device.let_go
        stream = StepStream(self, self._device, executor, self._on_step, self._clock)
        if executor.steady is not None:
            executor.steady.attach()
            self._device.interrupt = executor.steady.end
        self._open[stream] = None
        return stream

    def submit(self, stream: StepStream, step: Step) -> None:
        """Takes a step of an open stream: see `StepStream.submit`."""
        if stream.is_stopped:
            return
        if stream.epoch is None:
            stream.epoch = step.epoch
            if self.epoch < step.epoch <= self.epoch + MAX_EPOCH_JUMP:
                self._take_over(stream, step.epoch)
        if self._running is stream:
            stream.queue(step)
        else:
            error = BlockyardError(Reason.WRONG_STATE, self._explain(step.epoch), metadata={"epoch": str(self.epoch)})
            stream.answer(StepOutput(step.epoch, step.step_id, refusal=error))

    def _explain(self, epoch: int) -> str:
        """Explains why an epoch does not run."""
        if epoch > self.epoch + MAX_EPOCH_JUMP:
            return f"epoch {epoch} is too far ahead: epoch {self.epoch} was seen, and {self.epoch + 1} comes next"
        return f"epoch {epoch} is over: epoch {self.epoch} was seen"

    def prepare(self, epoch: int) -> None:
        """Ends the epochs before `epoch`, which is about to begin; raises BlockyardError WRONG_STATE if it may not."""
        if not self.epoch < epoch <= self.epoch + MAX_EPOCH_JUMP:
            raise BlockyardError(Reason.WRONG_STATE, self._explain(epoch), metadata={"epoch": str(self.epoch)})
        self._end_running(epoch)
        self.epoch = epoch - 1

    def _end_running(self, epoch: int) -> None:
        if self._running is not None:
            self._running.stop(BlockyardError(Reason.WRONG_STATE, f"epoch {epoch} took over"))

    def _take_over(self, stream: StepStream, epoch: int) -> None:
        self._end_running(epoch)
        self._on_epoch(epoch)
        self._running, self.epoch = stream, epoch
        self._device.post(lambda: stream.executor.begin_epoch(epoch))
        log.info("epoch begins", epoch=epoch)

    def close(self, stream: StepStream) -> bool:
        """Closes a stream, however it ended: its steps that wait are dropped, and its sequences forgotten.

        Returns whether its epoch ran.
        """
        stream.stop()
        if self._open.pop(stream, stream) is None and stream.executor.steady is not None:
            stream.executor.steady.detach()
        if not self._open:
            self._all_closed.set()
        if self._running is not stream:
            return False
        self._running = None
        self._device.post(stream.executor.forget)
        log.info("epoch ends", epoch=stream.epoch)
        return True

    def drain(self) -> None:
        """Makes every stream report that the worker drains. No stream may be opened after this."""
        for stream in self._open:
            stream.drain()

    async def end(self, error: BlockyardError, seconds: float) -> bool:
        """Gives the scheduler some seconds to close every stream, ends the others, and returns whether there were any.

        An end that the scheduler sends cannot be lost on its way, as the last answer of a server can.
        """
        if self._open:
            self._all_closed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed.wait(), seconds)
        for stream in self._open:
            stream.end(error)
        return bool(self._open)


def _log_new_sequences(step: Step) -> None:
    for new in step.new_sequences:
        log.debug(
            "sequence begins",
            request_id=new.request_id,
            sequence_id=new.sequence_id,
            epoch=step.epoch,
            step_id=step.step_id,
            num_tokens=len(new.token_ids),
            num_computed_tokens=new.num_computed_tokens,
            trace_id=new.trace_context.trace_id if new.trace_context else None,
        )
