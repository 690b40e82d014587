"""Chooses how many steps to keep in flight, so that the worker never waits for the round trip to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

MIN_STEPS_IN_FLIGHT = 2
# For steps as short as the way to the scheduler and back. Each step in flight is one more that is scheduled before
# the end of a sequence is known.
MAX_STEPS_IN_FLIGHT = 3
# Apart from each other, so that a step time between them does not make the depth flutter.
SHORT_STEP_SECONDS = 1.5e-3
LONG_STEP_SECONDS = 2.5e-3
_WEIGHT = 0.1


@dataclass(slots=True)
class PipelineDepth:
    """Learns how long steps take from what the worker says of them, unless it is fixed.

    Not from the time between answers: a pipeline too shallow makes that long, and would so stay shallow.
    """

    depth: int = MIN_STEPS_IN_FLIGHT
    is_fixed: bool = False
    _mean_seconds: float = LONG_STEP_SECONDS

    def on_answered(self, step_seconds: float) -> None:
        """Notes how long the worker was busy with a step."""
        if self.is_fixed:
            return
        self._mean_seconds += _WEIGHT * (step_seconds - self._mean_seconds)
        if self._mean_seconds < SHORT_STEP_SECONDS:
            self.depth = MAX_STEPS_IN_FLIGHT
        elif self._mean_seconds > LONG_STEP_SECONDS:
            self.depth = MIN_STEPS_IN_FLIGHT
