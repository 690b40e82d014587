"""Limits the requests that the gateway takes at once. Knows their number, not the requests."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

RETRY_SECONDS = 1.0


class Admission:
    """Refuses new requests while there are as many as the gateway takes.

    Args:
        max_requests: at once; 0: no limit.
        num_running: counts those that have begun.
    """

    def __init__(self, max_requests: int, num_running: Callable[[], int]) -> None:
        self._max_requests = max_requests
        self._num_running = num_running
        self._num_beginning = 0

    @contextmanager
    def beginning(self, *, is_new: bool) -> Generator[None]:
        """Counts a request while it is prepared; raises BlockyardError QUEUE_FULL for a new one beyond the limit.

        `is_new`: no client has a part of its answer.
        """
        if is_new and 0 < self._max_requests <= self._num_running() + self._num_beginning:
            message = f"this gateway has {self._max_requests} requests, its limit (--max-requests): try again"
            raise BlockyardError(Reason.QUEUE_FULL, message, retry_after_seconds=RETRY_SECONDS)
        self._num_beginning += 1
        try:
            yield
        finally:
            self._num_beginning -= 1
