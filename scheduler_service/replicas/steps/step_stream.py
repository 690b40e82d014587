"""The step stream of one epoch, to a replica of one worker; `Steps` is what the step loop knows of any replica's."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from blockyard.service import faults
from scheduler_service.replicas import codec
from scheduler_service.replicas.steps.answer_checks import WrongAnswer

if TYPE_CHECKING:
    from scheduler_service.core.values import SchedulerOutput, StepResult
    from scheduler_service.replicas.steps.answer_checks import AnswerLimits
    from scheduler_service.replicas.worker_link import StepCall


class Steps(Protocol):
    """The steps of one epoch, to all workers of a replica. One task sends, another receives; answers come in the order
    of the steps.

    `step_seconds`: how long the workers were busy with the step that was answered last. `encode_seconds`: how long it
    took to make a message of the step that was sent last.
    """

    epoch: int
    step_seconds: float
    encode_seconds: float

    async def send(self, output: SchedulerOutput) -> None:
        """Sends one step; returns when it is on its way. Raises BlockyardError when the stream is broken."""
        ...

    async def receive(self) -> StepResult:
        """Waits for the next answer. Raises BlockyardError when the stream is broken, a step was refused or the answer
        is wrong; DRAINING when a worker stops."""
        ...

    def cancel(self) -> None:
        """Ends the stream."""
        ...


class StepStream:
    """The steps of one epoch, to the one worker of a replica; see `Steps`."""

    def __init__(self, call: StepCall, epoch: int, limits: AnswerLimits) -> None:
        self.epoch = epoch
        self.step_seconds = 0.0
        self.encode_seconds = 0.0
        self._call = call
        self._limits = limits
        self._last_answered = 0

    async def send(self, output: SchedulerOutput) -> None:
        """Sends one step."""
        faults.reach(faults.BEFORE_SEND)
        begin = time.perf_counter()
        step = codec.encode_step(output, self.epoch).SerializeToString()
        self.encode_seconds = time.perf_counter() - begin
        await self._call.write(step)
        faults.reach(faults.AFTER_SEND)

    async def receive(self) -> StepResult:
        """Waits for the next answer."""
        message = await self._call.read()
        result = codec.decode_answer(message, self._limits)
        check_turn(message.epoch, result.step_id, self.epoch, self._last_answered + 1)
        self._last_answered = result.step_id
        self.step_seconds = result.forward_seconds + result.cache_seconds
        return result

    def cancel(self) -> None:
        """Ends the stream."""
        self._call.cancel()


def check_turn(epoch: int, step_id: int, due_epoch: int, due_step_id: int) -> None:
    """Raises WrongAnswer for an answer that is not the one that is due."""
    if epoch != due_epoch or step_id != due_step_id:
        raise WrongAnswer(
            f"it is of step {step_id} of epoch {epoch} where step {due_step_id} of epoch {due_epoch} was due"
        )
