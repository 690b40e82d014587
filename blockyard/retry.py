"""When a failed call is worth another try, and after how long. Decides only; whoever calls it sleeps."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:
    from blockyard.errors import BlockyardError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often to try, and how long to wait in between.

    The server's own hint goes first, within `max_delay_seconds`; without one the delay doubles from
    `initial_delay_seconds`. Either is spread by a quarter, so that clients that failed together do not come back
    together.
    """

    max_attempts: int = 4
    initial_delay_seconds: float = 0.1
    max_delay_seconds: float = 5.0

    def delay_seconds(self, error: BlockyardError, num_failures: int) -> float | None:
        """Tells how long to wait after this failure, the `num_failures`-th in a row; None: do not try again."""
        if error.code is not grpc.StatusCode.UNAVAILABLE or num_failures >= self.max_attempts:
            return None
        hint = error.retry_after_seconds
        delay = self.initial_delay_seconds * 2 ** (num_failures - 1) if hint is None else hint
        return min(delay, self.max_delay_seconds) * random.uniform(1.0, 1.25)


class Deadline:
    """How much of a caller's time is left."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def remaining(self, at_most: float | None = None) -> float | None:
        """Seconds that are left, at least 0; None: as many as it takes."""
        left = None if self._end is None else max(0.0, self._end - time.monotonic())
        return min((seconds for seconds in (left, at_most) if seconds is not None), default=None)

    def allows(self, delay_seconds: float) -> bool:
        """Tells whether there is time for anything after this delay."""
        remaining = self.remaining()
        return remaining is None or delay_seconds < remaining


class Attempts:
    """The tries of one call."""

    def __init__(self, policy: RetryPolicy, timeout: float | None) -> None:
        self._policy = policy
        self._num_failures = 0
        self.deadline = Deadline(timeout)

    def delay_after(self, error: BlockyardError) -> float:
        """Counts a failure and tells how many seconds to wait; raises it when it is the last."""
        self._num_failures += 1
        delay_seconds = self._policy.delay_seconds(error, self._num_failures)
        if delay_seconds is None or not self.deadline.allows(delay_seconds):
            raise error
        return delay_seconds
