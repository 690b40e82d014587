"""The steps that were sent to a worker and not answered: how many there should be, and when the oldest is overdue.

A worker that hangs says nothing, so only time tells it from a slow one. A false alarm costs a prefill of everything, a
late one costs the clients a pause: the limits are generous where little is known.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core.values import SchedulerOutput

MIN_STEPS_IN_FLIGHT = 2
# For steps as short as the round trip to the scheduler. Each further step in flight is scheduled without knowing
# whether a sequence has ended.
MAX_STEPS_IN_FLIGHT = 3
# Two thresholds, so that a step time near one of them does not make the depth oscillate.
SHORT_STEP_SECONDS = 1.5e-3
LONG_STEP_SECONDS = 2.5e-3
_WEIGHT = 0.1
# The deadline of a step: this many times what similar steps took, but no less than the shortest.
SHORTEST_SECONDS = 2.0
FACTOR = 20.0
# The first steps of an epoch may compile kernels, fault memory in or fill caches: their least deadline.
NUM_FIRST_STEPS = 4
FIRST_SECONDS = 10.0
# The deadline of a step while nothing was measured.
UNKNOWN_SECONDS = 60.0
SECONDS_PER_TOKEN = 0.05
_NUM_RECENT = 32
# If the watch wakes this much too late, the whole process or machine was stopped.
_LATE_SECONDS = 0.5
# How much longer than a step's deadline its ranks may wait for each other.
_RANKS_SECONDS = 0.5


@dataclass(slots=True)
class PipelineDepth:
    """How many steps to keep in flight, by the step times that the worker reports; or fixed.

    The time between answers would not do: a pipeline that is too shallow makes it long, and would stay shallow.
    """

    depth: int = MIN_STEPS_IN_FLIGHT
    is_fixed: bool = False
    _mean_seconds: float = LONG_STEP_SECONDS

    def on_answered(self, step_seconds: float) -> None:
        """Learns how long the worker was busy with a step."""
        if self.is_fixed:
            return
        self._mean_seconds += _WEIGHT * (step_seconds - self._mean_seconds)
        if self._mean_seconds < SHORT_STEP_SECONDS:
            self.depth = MAX_STEPS_IN_FLIGHT
        elif self._mean_seconds > LONG_STEP_SECONDS:
            self.depth = MIN_STEPS_IN_FLIGHT


class StepDeadline:
    """Computes each step's deadline in seconds from recent steps; with `fixed_seconds` it is the same for all."""

    def __init__(self, fixed_seconds: float = 0.0) -> None:
        self._fixed_seconds = fixed_seconds
        # Durations by the number of bits of a step's token count: such steps have similar sizes.
        self._recent: dict[int, deque[float]] = {}
        self._num_answered = 0

    @property
    def shortest_seconds(self) -> float:
        return self._fixed_seconds or SHORTEST_SECONDS

    def begin_epoch(self) -> None:
        """Begins an epoch: the worker may have just started."""
        self._num_answered = 0

    def find_seconds(self, num_tokens: int) -> float:
        if self._fixed_seconds:
            return self._fixed_seconds
        limit = max(SHORTEST_SECONDS, FACTOR * self._estimate(num_tokens))
        return max(limit, FIRST_SECONDS) if self._num_answered < NUM_FIRST_STEPS else limit

    def _estimate(self, num_tokens: int) -> float:
        """Returns the longest recent time of similar steps, or of the largest smaller ones in proportion."""
        size = num_tokens.bit_length()
        known = max((bits for bits in self._recent if bits <= size), default=None)
        if known is None:
            return (UNKNOWN_SECONDS + SECONDS_PER_TOKEN * num_tokens) / FACTOR
        longest = max(self._recent[known])
        return longest if known == size else max(longest * 2 ** (size - known), SECONDS_PER_TOKEN * num_tokens / FACTOR)

    def on_answered(self, num_tokens: int, seconds: float) -> None:
        self._num_answered += 1
        self._note(num_tokens, seconds)

    def on_missed(self, num_tokens: int) -> None:
        """Notes a step that missed its deadline. It may have been slow: similar steps get twice as long next time."""
        self._note(num_tokens, 2 * self.find_seconds(num_tokens) / FACTOR)

    def _note(self, num_tokens: int, seconds: float) -> None:
        self._recent.setdefault(num_tokens.bit_length(), deque(maxlen=_NUM_RECENT)).append(seconds)


@dataclass(frozen=True, slots=True)
class _Sent:
    output: SchedulerOutput
    num_tokens: int
    seconds: float


class AnsweredStep(NamedTuple):
    """A step's size without drafts, when it was answered, and how long the worker may have been busy with it."""

    num_sequences: int
    num_tokens: int
    answered_at: float
    wait_seconds: float


class StepsInFlight:
    """Steps that were sent and not answered, oldest first."""

    def __init__(self, deadline: StepDeadline, clock: Callable[[], float]) -> None:
        self._deadline = deadline
        self._clock = clock
        self._sent: deque[_Sent] = deque()
        # When the worker can have begun the oldest step.
        self._busy_since = 0.0

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def oldest(self) -> SchedulerOutput | None:
        return self._sent[0].output if self._sent else None

    @property
    def sequence_ids(self) -> set[int]:
        return {sequence_id for step in self._sent for sequence_id in step.output.sequence_ids}

    @property
    def timeout_seconds(self) -> float:
        """How long ranks may wait for each other in the step that was sent last.

        It is a little longer than the step's deadline, so that the scheduler misses the step first.
        """
        return self._sent[-1].seconds + _RANKS_SECONDS

    def describe(self) -> list[tuple[int, int, int]]:
        """Returns the id, the sequences and the tokens of each step, oldest first."""
        return [(step.output.step_id, len(step.output.sequence_ids), step.num_tokens) for step in self._sent]

    def begin_epoch(self) -> None:
        self._sent.clear()
        self._deadline.begin_epoch()

    def on_sent(self, output: SchedulerOutput) -> None:
        if not self._sent:
            self._busy_since = self._clock()
        # Each draft that is allowed may be computed.
        num_tokens = sum(output.num_new_tokens) + sum(output.max_draft_tokens)
        self._sent.append(_Sent(output, num_tokens, self._deadline.find_seconds(num_tokens)))

    def on_answered(self) -> AnsweredStep:
        """Removes the oldest step, which was answered; the worker is busy with the next one."""
        now, step = self._clock(), self._sent.popleft()
        seconds = now - self._busy_since
        self._deadline.on_answered(step.num_tokens, seconds)
        self._busy_since = now
        num_sure_tokens = step.num_tokens - sum(step.output.max_draft_tokens)
        return AnsweredStep(len(step.output.sequence_ids), num_sure_tokens, now, seconds)

    async def watch(self) -> None:
        """Waits for a step to be overdue. Raises BlockyardError NO_READY_WORKER then."""
        while True:
            due = self._due()
            await asyncio.sleep(due - self._clock())
            now = self._clock()
            if now - due > _LATE_SECONDS:
                # Answers that came meanwhile are still unread.
                self._busy_since = now
            if self._sent and now >= self._due():
                step = self._sent[0]
                self._deadline.on_missed(step.num_tokens)
                message = f"step {step.output.step_id} was not answered within {step.seconds:.3g} s"
                raise BlockyardError(Reason.NO_READY_WORKER, message)

    def _due(self) -> float:
        """Returns when to look again. Steps that are sent later are due later."""
        if self._sent:
            return self._busy_since + self._sent[0].seconds
        return self._clock() + self._deadline.shortest_seconds
