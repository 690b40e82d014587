"""Judges a worker by its epochs: one whose epochs keep breaking at once is left aside for a while.

An epoch is sound once some of its steps were answered as they should be. A worker whose epochs break again and again
before that may be broken itself: to send it everything anew each time would only take requests from those that work.
An epoch that ended by a refusal which names its requests counts neither way.
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
# How often it is looked who is there meanwhile: a successor need not wait.
LOOK_SECONDS = 1.0


class Conduct:
    """One replica's. A worker process that was just started is judged anew.

    `num_unsound_epochs`: those in a row that broke before they were sound. `is_left_aside`: it is not tried for now.
    """

    def __init__(self) -> None:
        self.num_unsound_epochs = 0
        self.is_left_aside = False
        self._incarnations: tuple[str, ...] = ()
        self._num_answers = 0

    @property
    def is_sound(self) -> bool:
        """Whether the epoch that runs, or broke last, has shown that the worker works."""
        return self._num_answers >= SOUND_STEPS

    def begin_epoch(self, incarnations: tuple[str, ...]) -> None:
        """Another epoch begins, with these worker processes."""
        if incarnations != self._incarnations:
            self._incarnations = incarnations
            self.num_unsound_epochs = 0
        self._num_answers = 0

    def on_answered(self) -> None:
        """A step was answered as it should be."""
        self._num_answers += 1
        if self.is_sound:
            self.num_unsound_epochs = 0

    def on_epoch_broken(self) -> None:
        """The epoch broke, by whatever the worker did."""
        self.num_unsound_epochs += not self.is_sound

    @property
    def pause_seconds(self) -> float:
        """How long to leave the worker alone before the next epoch: twice as long each time."""
        num_pauses = self.num_unsound_epochs - MAX_UNSOUND_EPOCHS
        if num_pauses < 0:
            return 0.0
        return min(FIRST_PAUSE_SECONDS * 2.0 ** min(num_pauses, 60), LAST_PAUSE_SECONDS)

    async def sit_out(self, replica: Replica, clock: Callable[[], float]) -> None:
        """Waits for the pause to end, or for another process in the worker's place."""
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
