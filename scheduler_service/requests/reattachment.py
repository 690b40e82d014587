"""Answers for requests that a scheduler does not know yet, but a gateway may still bring.

For a while after the scheduler's start, an unknown request is "not known yet", and its cancellation is kept until the
request arrives. The cancellation of a known request is kept too: a gateway that was not attached has not heard of it,
and brings the request again. Owns these cancellations; knows no request and no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.errors import NOT_HEARD_OF, BlockyardError, Reason
from blockyard.retention import Retention

if TYPE_CHECKING:
    from collections.abc import Iterable

# How long a caller should wait: gateways attach within half a second once the scheduler takes requests.
RETRY_AFTER_SECONDS = 0.5
MAX_CANCELS = 100_000


class Reattachment:
    """The first seconds of a scheduler, in which gateways attach; 0: no such time.

    Times are the caller's, in seconds. The time counts from `begin`: gateways cannot send their requests before.
    """

    def __init__(self, seconds: float, keep_seconds: float = 60.0) -> None:
        """`keep_seconds`: how long cancellations are kept, at least `seconds`."""
        self._seconds = seconds
        self._ends_at: float | None = None
        # When each request was cancelled, by its id.
        self._cancelled_at = Retention[str, float](
            max_age_seconds=max(seconds, keep_seconds), max_entries=MAX_CANCELS, max_weight=MAX_CANCELS
        )

    def begin(self, now: float) -> None:
        """Begins the time: gateways can send requests now. Idempotent."""
        if self._ends_at is None:
            self._ends_at = now + self._seconds

    def is_over(self, now: float) -> bool:
        """Whether the time is over, so that all gateways count as attached."""
        return not self._seconds or (self._ends_at is not None and now >= self._ends_at)

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
            if len(self._cancelled_at) < MAX_CANCELS:
                self.note(request_id, now)
                kept.append(request_id)
        return kept

    def note(self, request_id: str, now: float) -> None:
        """Keeps the cancellation of a request, unless a later one is kept. `now`: when it was cancelled."""
        if (self._cancelled_at.get(request_id) or 0.0) <= now:
            self._cancelled_at.add(request_id, now, 1, now)

    def was_cancelled(self, request_id: str, arrived_at: float, now: float) -> bool:
        """Whether an arriving request was cancelled. A cancellation does not mean a request newer than itself."""
        self._cancelled_at.expire(now)
        cancelled_at = self._cancelled_at.get(request_id)
        return cancelled_at is not None and arrived_at <= cancelled_at
