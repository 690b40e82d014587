"""A device that computes nothing: executes steps in order, in a thread of its own, and takes its time for each."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from typing import TYPE_CHECKING, Any

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core.values import SchedulerOutput, StepResult


Answer = Any  # a StepResult, or the BlockyardError of a refusal


class Device:
    """Executes steps one after another in a thread of its own; each takes `step_seconds` and a step that was waiting
    starts the moment its predecessor ends, as on a GPU's queue.

    `execute` computes a step; `answer` is called in the device's thread with the step's id and what it gave.
    """

    def __init__(
        self,
        execute: Callable[[SchedulerOutput], StepResult],
        answer: Callable[[int, Answer], None],
        step_seconds: float,
    ) -> None:
        self._execute = execute
        self._answer = answer
        self._step_seconds = step_seconds
        self.num_submitted = 0
        # Cleared, no step begins.
        self.gate = threading.Event()
        self.gate.set()
        self._steps: queue.SimpleQueue[tuple[int, SchedulerOutput | BlockyardError, float] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def submit(self, step_id: int, step: SchedulerOutput | BlockyardError) -> None:
        """Queues a step, or what was wrong with it, to be answered in its turn."""
        self.num_submitted += 1
        self._steps.put((step_id, step, time.monotonic()))

    def close(self) -> None:
        """Ends after the steps that wait."""
        self.gate.set()
        self._steps.put(None)

    async def join(self) -> None:
        """Waits until the thread has ended."""
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        free_at = 0.0
        refused: BlockyardError | None = None
        while (item := self._steps.get()) is not None:
            step_id, step, arrival = item
            self.gate.wait()
            deadline = max(arrival, free_at) + self._step_seconds
            if isinstance(step, BlockyardError):
                refused = refused or step
            result: Answer = refused
            if not refused:
                try:
                    result = self._execute(step)
                except BlockyardError as error:
                    result = refused = error
                except Exception as error:  # noqa: BLE001 - whatever is wrong with a step is told in-band
                    result = refused = BlockyardError(Reason.BUG, f"step {step_id}: {type(error).__name__}: {error}")
            # A thread that wakes late does not make the device late, but work that took longer does.
            free_at = max(deadline, time.monotonic())
            time.sleep(max(0.0, deadline - time.monotonic()))
            self._answer(step_id, result)
