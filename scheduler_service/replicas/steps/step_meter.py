"""Measures steps: the time of their phases, their size, and how soon a cancelled request has left them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from scheduler_service.catalogue import CANCEL_SECONDS, PHASES, STEP_SECONDS, STEP_SEQUENCES, STEP_TOKENS

if TYPE_CHECKING:
    from blockyard.service.metrics import Registry
    from scheduler_service.core.values import StepResult
    from scheduler_service.replicas.steps.steps_in_flight import AnsweredStep


class StepMetrics:
    """What is measured of each step, of all replicas."""

    __slots__ = ("cancel", "encode", "execute", "num_sequences", "num_tokens", "schedule", "update", "wait")

    def __init__(self, registry: Registry) -> None:
        phases = (registry.histogram(STEP_SECONDS, phase) for phase in PHASES)
        self.schedule, self.encode, self.wait, self.execute, self.update = phases
        self.num_sequences = registry.histogram(STEP_SEQUENCES)
        self.num_tokens = registry.histogram(STEP_TOKENS)
        self.cancel = registry.histogram(CANCEL_SECONDS)


class StepMeter:
    """Measures the steps of one replica, and what ends while they are on their way. Takes microseconds of each step."""

    __slots__ = ("_cancelled", "_last_answered", "_last_scheduled", "_metrics")

    def __init__(self, metrics: StepMetrics) -> None:
        self._metrics = metrics
        self._last_scheduled = self._last_answered = 0
        # When the word came, and the last step that may compute what it ends.
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
        metrics.num_tokens.observe(step.num_tokens)
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
