"""Makes the spans of a step stream's traced sequences: one for each step that begins or prefills a sequence, one for
each run of decode steps. Lives in the event loop. Processes that do not trace have none.

A step with the same rows as the step before it is skipped. A stream without traced sequences keeps nothing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from blockyard.tracing.spans import Span, begin_span, traces_every_step

if TYPE_CHECKING:
    from blockyard.contract.trace import TraceContext
    from worker_service.step import Step, StepOutput

_STREAM_ENDED = "the step stream ended"


class _Traced(NamedTuple):
    context: TraceContext
    request_id: str


class _Run(NamedTuple):
    """Consecutive decode steps of a sequence."""

    span: Span
    first_step_id: int


class StepSpans:
    """The spans of one step stream. Takes steps and answers in their order."""

    def __init__(self) -> None:
        # The traced sequences that the worker has after the last answered step.
        self._traced: dict[int, _Traced] = {}
        self._runs: dict[int, _Run] = {}
        self._unanswered: deque[Step] = deque()
        self._rows: tuple[int, ...] = ()
        # A traced sequence was prefilled: its next step may decode, with the same rows.
        self._had_prefill = False
        self._last_step_id = 0
        # By time.perf_counter(), as the times of steps are.
        self._ended_at = 0.0

    def on_step(self, step: Step) -> None:
        """Takes a step that has arrived and is not checked yet."""
        if self._traced or self._unanswered or any(new.trace_context for new in step.new_sequences):
            self._unanswered.append(step)

    def on_result(self, result: StepOutput) -> None:
        """Takes the answer to a step before it is sent."""
        if not self._unanswered or self._unanswered[0].step_id != result.step_id or result.draining:
            return
        step = self._unanswered.popleft()
        if result.refusal is not None:
            self._end_runs(set(self._runs), error=str(result.refusal.reason))
            return
        self._change_sequences(step)
        if self._had_prefill or step.new_sequences or step.sequence_ids != self._rows or traces_every_step():
            self._look(step, result)
        self._rows, self._last_step_id = step.sequence_ids, step.step_id
        self._ended_at = result.times.begun_at + _busy_seconds(result)

    def _change_sequences(self, step: Step) -> None:
        """Updates the traced sequences in the order of a step: forks, finished ones, new ones."""
        traced = self._traced
        for fork in step.forks:
            if parent := traced.get(fork.parent_id):
                traced[fork.child_id] = parent
        for sequence_id in step.finished_sequence_ids:
            traced.pop(sequence_id, None)
        for new in step.new_sequences:
            traced.pop(new.sequence_id, None)
            if new.trace_context is not None:
                traced[new.sequence_id] = _Traced(new.trace_context, new.request_id)

    def _look(self, step: Step, result: StepOutput) -> None:
        new_ids = {new.sequence_id for new in step.new_sequences}
        decoding: set[int] = set()
        self._had_prefill = False
        for sequence_id, num_new_tokens in zip(step.sequence_ids, step.num_new_tokens.tolist(), strict=True):
            if sequence_id not in self._traced:
                continue
            if num_new_tokens == 1 and sequence_id not in new_ids:
                decoding.add(sequence_id)
                if traces_every_step():
                    self._add_step_span("decode step", sequence_id, num_new_tokens, step, result)
            else:
                self._had_prefill = True
                self._add_step_span("prefill step", sequence_id, num_new_tokens, step, result)
        self._end_runs(self._runs.keys() - decoding)
        for sequence_id in decoding - self._runs.keys():
            context, request_id = self._traced[sequence_id]
            span = begin_span(
                "decode steps",
                context,
                seconds_ago=_seconds_since(result.times.begun_at),
                request_id=request_id,
                epoch=step.epoch,
                sequence_id=sequence_id,
            )
            self._runs[sequence_id] = _Run(span, step.step_id)

    def _add_step_span(self, name: str, sequence_id: int, num_new_tokens: int, step: Step, result: StepOutput) -> None:
        times, (context, request_id) = result.times, self._traced[sequence_id]
        begun_ago = _seconds_since(times.begun_at)
        begin_span(
            name,
            context,
            seconds_ago=begun_ago,
            request_id=request_id,
            epoch=step.epoch,
            step_id=step.step_id,
            sequence_id=sequence_id,
            num_new_tokens=num_new_tokens,
            num_step_sequences=len(step.sequence_ids),
            num_step_tokens=int(step.num_new_tokens.sum()),
            queue_seconds=times.queue_seconds,
            cache_operations_seconds=times.cache_operations_seconds,
            forward_seconds=times.forward_seconds,
            sample_seconds=times.sample_seconds,
        ).end(seconds_ago=begun_ago - _busy_seconds(result))

    def _end_runs(self, sequence_ids: set[int], error: str = "") -> None:
        """Ends runs of decode steps, with the last step that had them."""
        seconds_ago = _seconds_since(self._ended_at)
        for sequence_id in sequence_ids:
            run = self._runs.pop(sequence_id)
            run.span.set(num_steps=self._last_step_id - run.first_step_id + 1, last_step_id=self._last_step_id)
            run.span.end(error=error, seconds_ago=seconds_ago)

    def close(self) -> None:
        """Ends the spans of all runs: the stream has ended."""
        self._end_runs(set(self._runs), error=_STREAM_ENDED)


def _seconds_since(at: float) -> float:
    return time.perf_counter() - at


def _busy_seconds(result: StepOutput) -> float:
    times = result.times
    return times.cache_operations_seconds + times.forward_seconds + times.sample_seconds
