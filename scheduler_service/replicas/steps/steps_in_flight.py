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
# For steps as short as the way to the scheduler and back. Each step in flight is one more that is scheduled before
# the end of a sequence is known.
MAX_STEPS_IN_FLIGHT = 3
# Apart from each other, so that a step time between them does not make the depth flutter.
SHORT_STEP_SECONDS = 1.5e-3
LONG_STEP_SECONDS = 2.5e-3
_WEIGHT = 0.1
# The deadline of a step: this many times what similar steps took, but no less than the shortest.
SHORTEST_SECONDS = 2.0
FACTOR = 20.0
# Steps of an epoch that may compile kernels, fault memory in or fill caches, and what they are given at least.
NUM_FIRST_STEPS = 4
FIRST_SECONDS = 10.0
# Where nothing was measured yet.
UNKNOWN_SECONDS = 60.0
SECONDS_PER_TOKEN = 0.05
_NUM_RECENT = 32
# A watch that wakes so much too late was stopped itself, with its whole process or machine.
_LATE_SECONDS = 0.5
# The time that ranks get beyond a step's deadline.
_RANKS_SECONDS = 0.5


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


class StepDeadline:
    """Gives each step its limit in seconds; with `fixed_seconds` the same one to all."""

    def __init__(self, fixed_seconds: float = 0.0) -> None:
        self._fixed_seconds = fixed_seconds
        # Durations by the number of bits of a step's token count: such steps have similar sizes.
        self._recent: dict[int, deque[float]] = {}
        self._num_answered = 0

    @property
    def shortest_seconds(self) -> float:
        """No limit is shorter."""
        return self._fixed_seconds or SHORTEST_SECONDS

    def begin_epoch(self) -> None:
        """The worker may have just started."""
        self._num_answered = 0

    def find_seconds(self, num_tokens: int) -> float:
        """The limit of a step with so many tokens."""
        if self._fixed_seconds:
            return self._fixed_seconds
        limit = max(SHORTEST_SECONDS, FACTOR * self._estimate(num_tokens))
        return max(limit, FIRST_SECONDS) if self._num_answered < NUM_FIRST_STEPS else limit

    def _estimate(self, num_tokens: int) -> float:
        """The longest of the recent similar steps. If there are none: of the largest smaller ones, in proportion."""
        size = num_tokens.bit_length()
        known = max((bits for bits in self._recent if bits <= size), default=None)
        if known is None:
            return (UNKNOWN_SECONDS + SECONDS_PER_TOKEN * num_tokens) / FACTOR
        longest = max(self._recent[known])
        return longest if known == size else max(longest * 2 ** (size - known), SECONDS_PER_TOKEN * num_tokens / FACTOR)

    def on_answered(self, num_tokens: int, seconds: float) -> None:
        """Notes how long a step took."""
        self._num_answered += 1
        self._note(num_tokens, seconds)

    def on_missed(self, num_tokens: int) -> None:
        """Notes a step that was given up on. It may have been slow: what is like it gets twice as long next time."""
        self._note(num_tokens, 2 * self.find_seconds(num_tokens) / FACTOR)

    def _note(self, num_tokens: int, seconds: float) -> None:
        self._recent.setdefault(num_tokens.bit_length(), deque(maxlen=_NUM_RECENT)).append(seconds)


@dataclass(frozen=True, slots=True)
class _Sent:
    output: SchedulerOutput
    num_tokens: int
    seconds: float


class AnsweredStep(NamedTuple):
    """What a step held, when it was answered, and how long the worker may have been busy with it."""

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
        # Since when the worker can have been busy with the oldest.
        self._busy_since = 0.0

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def oldest(self) -> SchedulerOutput | None:
        """The step whose answer is due next."""
        return self._sent[0].output if self._sent else None

    @property
    def sequence_ids(self) -> set[int]:
        """The sequences that the steps in flight compute."""
        return {sequence_id for step in self._sent for sequence_id in step.output.sequence_ids}

    @property
    def timeout_seconds(self) -> float:
        """How long ranks may wait for each other in the step that was sent last: until it is missed here, and a little
        longer, so that it is missed here first."""
        return self._sent[-1].seconds + _RANKS_SECONDS

    def describe(self) -> list[tuple[int, int, int]]:
        """Returns the id, the sequences and the tokens of each step, oldest first."""
        return [(step.output.step_id, len(step.output.sequence_ids), step.num_tokens) for step in self._sent]

    def begin_epoch(self) -> None:
        """Forgets all steps."""
        self._sent.clear()
        self._deadline.begin_epoch()

    def on_sent(self, output: SchedulerOutput) -> None:
        """Notes a step that is about to be sent."""
        if not self._sent:
            self._busy_since = self._clock()
        num_tokens = sum(output.num_new_tokens)
        self._sent.append(_Sent(output, num_tokens, self._deadline.find_seconds(num_tokens)))

    def on_answered(self) -> AnsweredStep:
        """Removes the oldest step, which was answered; the worker is busy with the next one."""
        now, step = self._clock(), self._sent.popleft()
        seconds = now - self._busy_since
        self._deadline.on_answered(step.num_tokens, seconds)
        self._busy_since = now
        return AnsweredStep(len(step.output.sequence_ids), step.num_tokens, now, seconds)

    async def watch(self) -> None:
        """Waits for a step to be overdue. Raises BlockyardError NO_READY_WORKER then."""
        while True:
            due = self._due()
            await asyncio.sleep(due - self._clock())
            now = self._clock()
            if now - due > _LATE_SECONDS:
                # Answers that came meanwhile have not been read yet.
                self._busy_since = now
            if self._sent and now >= self._due():
                step = self._sent[0]
                self._deadline.on_missed(step.num_tokens)
                message = f"step {step.output.step_id} was not answered within {step.seconds:.3g} s"
                raise BlockyardError(Reason.NO_READY_WORKER, message)

    def _due(self) -> float:
        """When to look again: a step that is sent later is due later."""
        if self._sent:
            return self._busy_since + self._sent[0].seconds
        return self._clock() + self._deadline.shortest_seconds
