"""The limits of the backlog, and the Retry-After of requests that exceed them.

Knows neither the requests nor their order; the time comes in with each call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import NamedTuple

MIN_RETRY_SECONDS = 0.1
MAX_RETRY_SECONDS = 300.0

NUM_SLICES = 16
"""Parts of a drain rate's window. Old admissions leave the window one part at a time."""

PROMISED_SHARE = 0.9
"""Share of the measured rate that is promised. With the whole rate, a drop of a few percent while thousands of rejected
clients wait would fill the queue before their turn, and they would be rejected again."""


class Limit(Enum):
    """Which limit keeps a request out."""

    QUEUE_FULL = "queue_full"
    TOKEN_BACKLOG = "token_backlog"
    TENANT_QUOTA = "tenant_quota"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the backlog; 0: no limit. Tokens are those of prompts; `max_tenant_requests` holds for each tenant."""

    max_waiting_requests: int = 0
    max_waiting_tokens: int = 0
    max_tenant_requests: int = 0

    def halved(self) -> Limits:
        """Returns limits half as large, except that of each tenant."""
        return Limits(-(-self.max_waiting_requests // 2), -(-self.max_waiting_tokens // 2), self.max_tenant_requests)


@dataclass(frozen=True, slots=True)
class Overload:
    """Why a request may not wait, and how much must be admitted before it may: requests, or tokens of prompts."""

    limit: Limit
    num_requests: int = 0
    num_tokens: int = 0


class _Slice(NamedTuple):
    """Admissions within a part of the window."""

    begin: float
    num_requests: int
    num_tokens: int


class DrainRate:
    """Measures how fast the backlog drains over a sliding window, and computes Retry-After from it.

    Each rejected request is promised a place, and the next rejected request is told to come later than that: otherwise
    all would come back at once for one free place.
    """

    __slots__ = ("_promised_until", "_slice_seconds", "_slices", "_started_at", "_window_seconds")

    def __init__(self, now: float, window_seconds: float = 30.0) -> None:
        self._window_seconds = window_seconds
        self._slice_seconds = window_seconds / NUM_SLICES
        self._slices: deque[_Slice] = deque()
        self._started_at = now
        self._promised_until = now

    def note(self, num_requests: int, num_tokens: int, now: float) -> None:
        """Notes requests that were admitted, and their prompt tokens."""
        self._forget(now)
        last = _Slice(now, 0, 0)
        if self._slices and now - self._slices[-1].begin < self._slice_seconds:
            last = self._slices.pop()
        self._slices.append(_Slice(last.begin, last.num_requests + num_requests, last.num_tokens + num_tokens))

    def has_promised(self, now: float) -> bool:
        """Whether a rejected request is still expected."""
        return self._promised_until > now

    def retry_after_seconds(self, overload: Overload, now: float) -> float:
        """Returns the seconds until the excess and all earlier promises will have drained. Promises a place then."""
        free_at = max(self._promised_until, now) + self._find_seconds(overload, now)
        self._promised_until = min(free_at, now + MAX_RETRY_SECONDS)
        return max(self._promised_until - now, MIN_RETRY_SECONDS)

    def _find_seconds(self, overload: Overload, now: float) -> float:
        self._forget(now)
        measured_seconds = max(min(now - self._started_at, self._window_seconds), self._slice_seconds)
        num_requests = sum(part.num_requests for part in self._slices)
        num_tokens = sum(part.num_tokens for part in self._slices)
        return (
            measured_seconds
            / PROMISED_SHARE
            * max(_divide(overload.num_requests, num_requests), _divide(overload.num_tokens, num_tokens))
        )

    def _forget(self, now: float) -> None:
        while self._slices and self._slices[0].begin <= now - self._window_seconds:
            self._slices.popleft()


def _divide(excess: int, drained: int) -> float:
    if not excess:
        return 0.0
    return excess / drained if drained else inf
