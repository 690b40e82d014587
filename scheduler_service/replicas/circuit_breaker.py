"""A circuit breaker for one replica: after several epochs that failed at once, the next one waits for a while.

An epoch is sound once SOUND_STEPS steps were answered correctly. A worker whose epochs keep failing before that may be
broken itself, and sending it all requests again and again would only keep them from workers that work. An epoch that
ended with a refusal which names its requests counts neither way.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.replicas.replica import Replica

# Answers after which an epoch counts as sound.
SOUND_STEPS = 2
# Unsound epochs in a row after which the replica pauses.
MAX_UNSOUND_EPOCHS = 3
FIRST_PAUSE_SECONDS = 1.0
LAST_PAUSE_SECONDS = 30.0
# How often to look whether another process has taken the worker's place, which need not wait.
LOOK_SECONDS = 1.0


class CircuitBreaker:
    """Counts the epochs in a row that broke before they were sound; a new worker process begins at 0 again.

    `is_left_aside`: the replica is backing off.
    """

    def __init__(self) -> None:
        self.num_unsound_epochs = 0
        self.is_left_aside = False
        self._incarnations: tuple[str, ...] = ()
        self._num_answers = 0

    @property
    def is_sound(self) -> bool:
        """Whether the current or last epoch has shown that the worker works."""
        return self._num_answers >= SOUND_STEPS

    def begin_epoch(self, incarnations: tuple[str, ...]) -> None:
        if incarnations != self._incarnations:
            self._incarnations = incarnations
            self.num_unsound_epochs = 0
        self._num_answers = 0

    def on_answered(self) -> None:
        self._num_answers += 1
        if self.is_sound:
            self.num_unsound_epochs = 0

    def on_epoch_broken(self) -> None:
        self.num_unsound_epochs += not self.is_sound

    @property
    def pause_seconds(self) -> float:
        """Seconds to wait before the next epoch: doubled each time, 0 while few epochs have failed."""
        num_pauses = self.num_unsound_epochs - MAX_UNSOUND_EPOCHS
        if num_pauses < 0:
            return 0.0
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(num_pauses, 60), LAST_PAUSE_SECONDS)

    async def back_off(self, replica: Replica, clock: Callable[[], float]) -> None:
        """Waits until the pause ends or another process takes the worker's place."""
        until, before = clock() + self.pause_seconds, replica.incarnations
        self.is_left_aside = True
        try:
            while (left := until - clock()) > 0:
                await asyncio.sleep(min(left, LOOK_SECONDS))
                await replica.look()
                if "" in before or replica.incarnations != before:
                    return
        finally:
            self.is_left_aside = False
