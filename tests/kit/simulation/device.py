"""A simulated device: executes steps in order, in virtual time, on the loop of its process."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core.values import SchedulerOutput
    from tests.kit.fakes.fake_device import Answer


class SimDevice:
    """The device of `tests.kit.fakes.fake_device` without a thread; `draw_seconds` draws how long a step takes."""

    def __init__(
        self,
        execute: Callable[[SchedulerOutput], Answer],
        answer: Callable[[int, Answer], None],
        draw_seconds: Callable[[], float],
    ) -> None:
        self._execute = execute
        self._answer = answer
        self._draw_seconds = draw_seconds
        self._loop = asyncio.get_running_loop()
        self._steps: deque[tuple[int, SchedulerOutput | BlockyardError]] = deque()
        self._refused: BlockyardError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.num_submitted = 0

    def submit(self, step_id: int, step: SchedulerOutput | BlockyardError) -> None:
        """Queues a step, or what was wrong with it, to be answered in its turn."""
        self.num_submitted += 1
        self._steps.append((step_id, step))
        self._begin()

    def close(self) -> None:
        """Drops the steps that wait."""
        self._steps.clear()
        if self._timer is not None:
            self._timer.cancel()

    async def join(self) -> None:
        """There is no thread to wait for."""

    def _begin(self) -> None:
        if self._timer is None and self._steps:
            self._timer = self._loop.call_later(self._draw_seconds(), self._finish)

    def _finish(self) -> None:
        self._timer = None
        step_id, step = self._steps.popleft()
        self._answer(step_id, self._result(step_id, step))
        self._begin()

    def _result(self, step_id: int, step: SchedulerOutput | BlockyardError) -> Answer:
        if self._refused is None:
            if isinstance(step, BlockyardError):
                self._refused = step
            else:
                try:
                    return self._execute(step)
                except BlockyardError as error:
                    self._refused = error
                except Exception as error:  # noqa: BLE001 - whatever is wrong with a step is told in-band
                    message = f"step {step_id}: {type(error).__name__}: {error}"
                    self._refused = BlockyardError(Reason.BUG, message)
        return self._refused
