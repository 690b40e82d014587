"""Errors for a replica that cannot be set up now, and when to try again."""

from __future__ import annotations

# The longest waits between two attempts. A worker that answers with an error is asked again, since a folder can be
# repaired, but rarely, since a set-up is heavy work. A worker that restarts makes clients wait: it is asked more often.
UNREACHABLE_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 1.0
LAST_FAILURE_RETRY_SECONDS = 10.0


class NotReady(Exception):
    """The replica cannot be set up now; the message says why.

    `retry_seconds`: the longest wait before the next attempt. `needs_repair`: only an operator can help.
    """

    def __init__(self, message: str, retry_seconds: float = LAST_RETRY_SECONDS, *, needs_repair: bool = False) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.needs_repair = needs_repair


class Unreachable(NotReady):
    """No worker answers at the address."""

    def __init__(self, message: str) -> None:
        super().__init__(message, UNREACHABLE_RETRY_SECONDS)


class Misconfigured(NotReady):
    """These worker processes can never serve this configuration."""

    def __init__(self, message: str) -> None:
        super().__init__(message, needs_repair=True)


class Unusable(Exception):
    """The first worker cannot be set up, and the settings do not wait for a repair; the message says why."""
