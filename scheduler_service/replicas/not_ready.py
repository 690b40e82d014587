"""Says why a replica cannot be set up now, and whether to try again."""

from __future__ import annotations

# How long to wait at most between two attempts. A worker that answers with an error is asked again, since a folder can
# be repaired, but a set-up is heavy work; one that comes back is a pause for its clients: it is looked for more often.
UNREACHABLE_RETRY_SECONDS = 0.25
LAST_RETRY_SECONDS = 1.0
LAST_FAILURE_RETRY_SECONDS = 10.0


class NotReady(Exception):
    """The replica cannot be set up now; the message tells a person why.

    `retry_seconds`: how long to wait at most before the next attempt. `needs_repair`: only a person can help.
    """

    def __init__(self, message: str, retry_seconds: float = LAST_RETRY_SECONDS, *, needs_repair: bool = False) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.needs_repair = needs_repair


class Unreachable(NotReady):
    """Nobody answers where a worker should be."""

    def __init__(self, message: str) -> None:
        super().__init__(message, UNREACHABLE_RETRY_SECONDS)


class Misconfigured(NotReady):
    """These worker processes can never serve this configuration."""

    def __init__(self, message: str) -> None:
        super().__init__(message, needs_repair=True)


class Unusable(Exception):
    """The first worker cannot be set up, and nobody is to wait for a repair; the message tells a person why."""
