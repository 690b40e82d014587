"""One epoch's steps on their way to the device thread and its answers on their way back, in order.

Lives in the event loop. Knows neither what a step means nor how it travels.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from worker_service.device_thread import DeviceThread, call_soon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from blockyard.errors import BlockyardError
    from worker_service.step import Step, StepResult
    from worker_service.step_executor import StepExecutor


class StepStream:
    """Steps in, answers out. Ended, it drops the steps that did not start."""

    def __init__(self, device: DeviceThread, executor: StepExecutor) -> None:
        self.epoch: int | None = None
        self._device = device
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._answers: asyncio.Queue[StepResult | BlockyardError | None] = asyncio.Queue()
        # Read by the device thread between two steps.
        self._stopped = False

    def submit(self, step: Step) -> None:
        """Queues a step for the device thread."""
        arrival = time.perf_counter()
        self._device.post(lambda: self._run(step, arrival))

    def _run(self, step: Step, arrival: float) -> None:
        if not self._stopped:
            result = self._executor.execute(step, arrival)
            call_soon(self._loop, self._answers.put_nowait, result)

    def answer(self, result: StepResult) -> None:
        """Answers a step that does not reach the device thread."""
        self._answers.put_nowait(result)

    def finish(self) -> None:
        """Ends after the steps that wait: no more will come."""
        self._device.post(lambda: call_soon(self._loop, self._answers.put_nowait, None))

    def stop(self, error: BlockyardError | None = None) -> None:
        """Ends after the step that runs; those that wait are dropped. `error` tells the scheduler why."""
        if not self._stopped:
            self._stopped = True
            self._device.post(lambda: call_soon(self._loop, self._answers.put_nowait, error))

    async def answers(self) -> AsyncIterator[StepResult]:
        """Gives the answers in order; raises the error that the stream was stopped with."""
        while (answer := await self._answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer
