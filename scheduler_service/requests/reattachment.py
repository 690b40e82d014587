"""Answers for requests that a new scheduler does not know yet, while gateways are still attaching.

For a while an unknown request is "not known yet", and its cancellation is kept until the request arrives. Owns these
cancellations; knows no request and no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import NOT_HEARD_OF, BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

# How long a caller should wait: gateways attach within half a second once the scheduler takes requests.
RETRY_AFTER_SECONDS = 0.5
MAX_CANCELS = 100_000


class Reattachment:
    """The first seconds of a scheduler, in which gateways attach; 0: no such time.

    Times are the caller's, in seconds. The time counts from `begin`: gateways cannot send their requests before.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at: float | None = None
        # When each unknown request was cancelled, by its id.
        self.cancelled_at: dict[str, float] = {}

    def begin(self, now: float) -> None:
        """Begins the time: gateways can send requests now. Idempotent."""
        if self._ends_at is None:
            self._ends_at = now + self._seconds

    def is_over(self, now: float) -> bool:
        """Whether the time is over, so that all gateways count as attached."""
        is_over = not self._seconds or (self._ends_at is not None and now >= self._ends_at)
        if is_over:
            self.cancelled_at.clear()
        return is_over

    def make_unknown_error(self, request_id: str, now: float) -> BlockyardError:
        """Makes the error for a request that is not here."""
        if self.is_over(now):
            return BlockyardError(Reason.REQUEST_EXPIRED, f"request {request_id} is unknown, or has expired")
        message = f"request {request_id} is not known yet: the scheduler has just started, and gateways reconnect to it"
        return BlockyardError(Reason.NO_READY_WORKER, message, (), RETRY_AFTER_SECONDS, dict(NOT_HEARD_OF))

    def cancel(self, request_ids: Iterable[str], now: float) -> list[str]:
        """Keeps the cancellation of unknown requests. Returns the ids that will be cancelled if they arrive."""
        if self.is_over(now):
            return []
        kept: list[str] = []
        for request_id in request_ids:
            if len(self.cancelled_at) < MAX_CANCELS:
                self.cancelled_at[request_id] = now
                kept.append(request_id)
        return kept

    def was_cancelled(self, request_id: str, arrived_at: float, now: float) -> bool:
        """Whether an arriving request was cancelled. A cancellation does not mean a request newer than itself."""
        if self.is_over(now):
            return False
        cancelled_at = self.cancelled_at.get(request_id)
        return cancelled_at is not None and arrived_at <= cancelled_at
