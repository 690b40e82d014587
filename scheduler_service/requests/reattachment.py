"""Answers for requests that a new scheduler does not know yet, since their gateways are still to attach.

For a while it answers "not yet" to an unknown name, and keeps a cancel of one until that request comes.
Owns the cancels that wait; knows no request and no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import NOT_HEARD_OF, BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

# How long who asks should wait: gateways are back within half a second of a scheduler that takes requests.
RETRY_AFTER_SECONDS = 0.5
MAX_CANCELS = 100_000


class Reattachment:
    """The first seconds of a scheduler that takes requests, in which gateways attach; 0: there are none.

    Times are the caller's, in seconds. It begins with `begin`: before, no gateway can send what it has.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at: float | None = None
        # By name, when a request was cancelled that is not here.
        self.cancelled_at: dict[str, float] = {}

    def begin(self, now: float) -> None:
        """Takes note that gateways can send requests. Without effect when it happens again."""
        if self._ends_at is None:
            self._ends_at = now + self._seconds

    def is_over(self, now: float) -> bool:
        """Whether all gateways are back that come back."""
        is_over = not self._seconds or (self._ends_at is not None and now >= self._ends_at)
        if is_over:
            self.cancelled_at.clear()
        return is_over

    def make_unknown_error(self, request_id: str, now: float) -> BlockyardError:
        """The answer to who asks for a request that is not here."""
        if self.is_over(now):
            return BlockyardError(Reason.REQUEST_EXPIRED, f"request {request_id} is unknown, or has expired")
        message = f"request {request_id} is not known yet: the scheduler has just started, and gateways reconnect to it"
        return BlockyardError(Reason.NO_READY_WORKER, message, (), RETRY_AFTER_SECONDS, dict(NOT_HEARD_OF))

    def cancel(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Keeps cancels of what is not here; returns those that will be applied should it come."""
        if self.is_over(now):
            return []
        kept: list[str] = []
        for request_id in request_ids:
            if len(self.cancelled_at) < MAX_CANCELS:
                self.cancelled_at[request_id] = now
                kept.append(request_id)
        return kept

    def was_cancelled(self, request_id: str, arrived_at: float, now: float) -> bool:
        """Whether a request that comes now was cancelled meanwhile. One that is newer than its cancel was not meant."""
        if self.is_over(now):
            return False
        cancelled_at = self.cancelled_at.get(request_id)
        return cancelled_at is not None and arrived_at <= cancelled_at
