"""The steps that were sent and not answered, and whether the oldest is overdue. Decides nothing about it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core.values import SchedulerOutput
    from scheduler_service.replicas.steps.step_deadline import StepDeadline

# A watch that wakes so much too late was stopped itself, with its whole process or machine.
_LATE_SECONDS = 0.5
# The time that ranks get beyond a step's deadline.
_RANKS_SECONDS = 0.5


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
