"""What operators see of steps: histograms of their phases and sizes, a debug line for each, and totals in the log."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.telemetry import EventLogger
from scheduler_service.catalogue import CANCEL_SECONDS, PHASES, STEP_SECONDS, STEP_SEQUENCES, STEP_TOKENS

if TYPE_CHECKING:
    from blockyard.service.metrics import Registry
    from scheduler_service.core.values import SchedulerOutput, SchedulerStats, StepResult
    from scheduler_service.replicas.steps.steps_in_flight import AnsweredStep

log = EventLogger(__name__)
_logger = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0


class StepMetrics:
    """The histograms of the steps of all replicas."""

    __slots__ = ("cancel", "encode", "execute", "num_sequences", "num_tokens", "schedule", "update", "wait")

    def __init__(self, registry: Registry) -> None:
        phases = (registry.histogram(STEP_SECONDS, phase) for phase in PHASES)
        self.schedule, self.encode, self.wait, self.execute, self.update = phases
        self.num_sequences = registry.histogram(STEP_SEQUENCES)
        self.num_tokens = registry.histogram(STEP_TOKENS)
        self.cancel = registry.histogram(CANCEL_SECONDS)


class StepMeter:
    """Measures the steps of one replica, and how soon cancelled requests leave them. Costs microseconds a step."""

    __slots__ = ("_cancelled", "_last_answered", "_last_scheduled", "_metrics")

    def __init__(self, metrics: StepMetrics) -> None:
        self._metrics = metrics
        self._last_scheduled = self._last_answered = 0
        # For each cancelled request: when it was cancelled, and the last step that may compute it.
        self._cancelled: deque[tuple[float, int]] = deque()

    def on_scheduled(self, step_id: int, seconds: float) -> None:
        """Notes a step that is about to be sent, and how long it took to plan it."""
        self._last_scheduled = step_id
        self._metrics.schedule.observe(seconds)

    def on_sent(self, encode_seconds: float) -> None:
        """Notes a step that was sent, and how long it took to encode it."""
        self._metrics.encode.observe(encode_seconds)

    def on_answered(self, result: StepResult, update_seconds: float, step: AnsweredStep) -> None:
        """Notes a step that was answered, and how long it took to process the answer."""
        metrics = self._metrics
        metrics.num_sequences.observe(step.num_sequences)
        metrics.num_tokens.observe(step.num_tokens + result.num_draft_tokens)
        metrics.wait.observe(step.wait_seconds)
        metrics.execute.observe(result.forward_seconds + result.cache_seconds)
        metrics.update.observe(update_seconds)
        self._last_answered = result.step_id
        if self._cancelled:
            self._free(step.answered_at, result.step_id)

    def on_cancelled(self, now: float) -> None:
        """Notes the end of a request that steps in flight may compute."""
        if self._last_scheduled > self._last_answered:
            self._cancelled.append((now, self._last_scheduled))
        else:
            self._metrics.cancel.observe(0.0)

    def on_lost(self, now: float) -> None:
        """Notes that the steps in flight are lost, and that steps count from 1 again."""
        self._free(now, self._last_scheduled)
        self._last_scheduled = self._last_answered = 0

    def _free(self, now: float, step_id: int) -> None:
        cancelled = self._cancelled
        while cancelled and cancelled[0][1] <= step_id:
            self._metrics.cancel.observe(now - cancelled.popleft()[0])


@dataclass(slots=True)
class StepLog:
    """Writes the log lines of steps, and counts them since the process started.

    `step_seconds`: how long the worker was busy, by its own clock.
    """

    num_steps: int = 0
    num_recomputed_sequences: int = 0
    schedule_seconds: float = 0.0
    update_seconds: float = 0.0
    step_seconds: float = 0.0
    _written_at: float = 0.0
    _written_steps: int = 0

    def on_scheduled(self, output: SchedulerOutput, epoch: int, seconds: float) -> None:
        """Counts a step that is about to be sent, and how long it took to schedule."""
        self.schedule_seconds += seconds
        num_recomputed = _num_recomputed(output) if output.new_sequences else 0
        self.num_recomputed_sequences += num_recomputed
        if not _logger.isEnabledFor(logging.DEBUG):
            return
        log.debug(
            "step",
            epoch=epoch,
            step_id=output.step_id,
            num_sequences=len(output.sequence_ids),
            num_tokens=sum(output.num_new_tokens),
            new=len(output.new_sequences),
            recomputed=num_recomputed,
            prefix_hits=sum(1 for sequence in output.new_sequences if sequence.num_computed_tokens),
            drafts=sum(output.max_draft_tokens),
            prefill_pieces=sum(1 for count in output.num_new_tokens if count > 1),
            forks=len(output.forks),
            appended_blocks=len(output.appended_block_ids),
            replaced_tables=len(output.replaced_tables),
            swapped_out=len(output.blocks_to_swap_out),
            swapped_in=len(output.blocks_to_swap_in),
            copied=len(output.blocks_to_copy),
            finished=len(output.finished_sequence_ids),
        )

    def on_answered(self, result: StepResult, seconds: float) -> None:
        """Counts an answer, and how long it took to process."""
        self.num_steps += 1
        self.update_seconds += seconds
        self.step_seconds += result.forward_seconds + result.cache_seconds
        if result.skipped_sequence_ids or result.failures:
            log.debug(
                "answer",
                step_id=result.step_id,
                skipped=len(result.skipped_sequence_ids),
                failed=len(result.failures),
            )

    def is_due(self, now: float) -> bool:
        if not self._written_at:
            self._written_at = now
        return self.num_steps > self._written_steps and now - self._written_at >= PERIOD_SECONDS

    def write_totals(self, stats: SchedulerStats, now: float) -> None:
        self._written_at, self._written_steps = now, self.num_steps
        num_steps = max(self.num_steps, 1)
        log.info(
            "totals",
            steps=self.num_steps,
            waiting=stats.num_waiting,
            running=stats.num_running,
            swapped=stats.num_swapped,
            free_device_blocks=stats.num_free_device_blocks,
            free_host_blocks=stats.num_free_host_blocks,
            preemptions=stats.num_preemptions_total,
            recomputed=self.num_recomputed_sequences,
            swapped_out=stats.num_swapped_out_blocks_total,
            swapped_in=stats.num_swapped_in_blocks_total,
            copied=stats.num_copied_blocks_total,
            prefill_pieces=stats.num_prefill_pieces_total,
            cached_tokens=stats.num_cached_tokens_total,
            prompt_tokens=stats.num_prompt_tokens_total,
            completion_tokens=stats.num_completion_tokens_total,
            schedule_us=round(1e6 * self.schedule_seconds / num_steps, 1),
            update_us=round(1e6 * self.update_seconds / num_steps, 1),
        )


def _num_recomputed(output: SchedulerOutput) -> int:
    """Counts new sequences that the worker had before: they have output, or are among the finished."""
    finished = set(output.finished_sequence_ids)
    return sum(
        len(sequence.token_ids) > sequence.prompt_length or sequence.sequence_id in finished
        for sequence in output.new_sequences
    )
