"""Counts and remembers, for operators, what replicas lost. Decides nothing."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MAX_RECORDS = 16


class RecoveryRecord(NamedTuple):
    """What a replica lost, and when (by the scheduler's clock): requests that had begun, and their tokens."""

    at: float
    replica_id: int
    cause: str
    num_requests: int
    num_tokens: int


class RecoveryLog:
    """Counts since the process started, and the latest records, newest first."""

    def __init__(self) -> None:
        self.num_recoveries = 0
        self.num_replayed_tokens = 0
        self.latest: deque[RecoveryRecord] = deque(maxlen=MAX_RECORDS)

    def add(self, record: RecoveryRecord) -> None:
        """Adds the loss of a replica's worker."""
        self.num_recoveries += 1
        self.latest.appendleft(record)
