"""Decides whether and after what delay a failed call is tried again. The caller sleeps."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from blockyard.clock import SYSTEM, Clock
from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason

# 0.1 s doubled 24 times is nearly three weeks: more doublings would only overflow.
_MAX_DOUBLINGS = 24


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The number of attempts of a call, and the delays between them.

    The delay is the server's hint; without a hint it doubles from `initial_delay_seconds`. It is at most
    `max_delay_seconds`, plus up to a quarter at random, so that clients that failed together do not return together.
    With several gateways one attempt tries all of them, without delay in between.

    A stream that has begun is tried for longer: it is given up after `max_attempts`, but not before `resume_seconds`
    after it broke, which is as long as gateways keep a request without a reader.
    """

    max_attempts: int = 4
    initial_delay_seconds: float = 0.1
    max_delay_seconds: float = 5.0
    resume_seconds: float = 60.0

    def delay_seconds(self, error: BlockyardError, num_failures: int, clock: Clock = SYSTEM) -> float:
        """Computes the seconds to wait after this failure, the `num_failures`-th in a row."""
        hint = error.retry_after_seconds
        doublings = min(num_failures - 1, _MAX_DOUBLINGS)
        delay = self.initial_delay_seconds * 2**doublings if hint is None else hint
        return min(delay, self.max_delay_seconds) * clock.random.uniform(1.0, 1.25)


def may_pass(error: BlockyardError) -> bool:
    """Returns whether the same call may succeed a little later, or at another gateway."""
    return error.code is grpc.StatusCode.UNAVAILABLE or (error.reason is Reason.BUG and is_of_transport(error))


def is_of_transport(error: BlockyardError) -> bool:
    """Returns whether gRPC itself reported the error, such as a connection that a proxy has reset."""
    return TRANSPORT_ORIGIN.items() <= error.metadata.items()


class Deadline:
    """The deadline of a caller's timeout."""

    def __init__(self, timeout: float | None, clock: Clock = SYSTEM) -> None:
        self._now = clock.monotonic
        self._end = None if timeout is None else self._now() + timeout

    def remaining(self, at_most: float | None = None) -> float | None:
        """Returns the seconds left, at least 0 and at most `at_most`; None: no limit."""
        left = None if self._end is None else max(0.0, self._end - self._now())
        return min((seconds for seconds in (left, at_most) if seconds is not None), default=None)

    def allows(self, delay_seconds: float) -> bool:
        """Returns whether time is left after this delay."""
        remaining = self.remaining()
        return remaining is None or delay_seconds < remaining


class Attempts:
    """Counts the attempts of one call at `num_targets` gateways.

    `clock`: times the attempts, and draws what is random in their delays.
    """

    def __init__(self, policy: RetryPolicy, timeout: float | None, num_targets: int = 1, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._policy = policy
        self._num_targets = num_targets
        self._num_failures = 0
        self._first_failure = 0.0
        self.deadline = Deadline(timeout, clock)

    def on_progress(self) -> None:
        """Forgets earlier failures, since the call made progress."""
        self._num_failures = 0

    def delay_after(self, error: BlockyardError, *, has_begun: bool = False) -> float:
        """Counts a failure and returns the seconds to wait; raises the error if no attempt or time is left."""
        if self._num_failures == 0:
            self._first_failure = self.clock.monotonic()
        self._num_failures += 1
        num_attempts, num_tried = divmod(self._num_failures, self._num_targets)
        if num_tried:
            delay_seconds = 0.0
        elif num_attempts >= self._policy.max_attempts and not (has_begun and self._is_in_resume_window()):
            raise error
        else:
            delay_seconds = self._policy.delay_seconds(error, num_attempts, self.clock)
        if not self.deadline.allows(delay_seconds):
            raise error
        return delay_seconds

    def _is_in_resume_window(self) -> bool:
        return self.clock.monotonic() - self._first_failure < self._policy.resume_seconds
