"""Remembers how epochs failed: which requests workers died of or refused, and what operators see of recoveries.

Knows no worker and no queue.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

SUSPECT_AFTER = 2
POISON_AFTER = 3
MAX_RECORDS = 16
_NUMBER = re.compile(r"\d+")


class _Record(NamedTuple):
    num_outputs: int
    num_deaths: int


class Deaths:
    """Counts for each live request how often in a row a worker died while it computed the request.

    A death counts against every request of the unanswered steps, and most of them are innocent. A new token clears a
    request. One that was there twice in a row is a suspect and runs beside no other suspect, so that the third death
    decides. A refusal that names its requests is a death of these alone.

    A worker that gives a wrong answer is not dead, and may be the one that is broken. That proves nothing against a
    request unless the worker had answered others well: then it makes suspects, and others are tried before them.
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def note(self, num_outputs: Mapping[str, int], live: Mapping[str, object], *, is_proof: bool = True) -> None:
        """Counts a death against the requests of unanswered steps, given with their tokens so far.

        `live`: all live requests. Without `is_proof` that one of them killed the worker, none becomes more than a
        suspect.
        """
        most = POISON_AFTER if is_proof else SUSPECT_AFTER
        met = {
            request_id: _Record(count, min(self._count(request_id, count), most))
            for request_id, count in num_outputs.items()
        }
        known = {request_id: record for request_id, record in self._records.items() if request_id in live}
        self._records = known | met

    def _count(self, request_id: str, num_outputs: int) -> int:
        last = self._records.get(request_id)
        return last.num_deaths + 1 if last and last.num_outputs == num_outputs else 1

    @property
    def suspects(self) -> list[str]:
        """Requests that must not run beside another suspect."""
        return [name for name, record in self._records.items() if record.num_deaths >= SUSPECT_AFTER]

    @property
    def poison(self) -> list[str]:
        return [name for name, record in self._records.items() if record.num_deaths >= POISON_AFTER]


class Refusals:
    """Remembers the last refusal of a step that each live request was in.

    A refusal is a bug, and a new epoch begins after it. A request that meets the same refusal again, without a new
    token in between, would do so for ever.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}

    def note(self, message: str, num_outputs: Mapping[str, int], live: Mapping[str, object]) -> list[str]:
        """Notes a refusal and its requests, with their tokens so far. Returns those that met it twice in a row.

        Numbers in the message are ignored: ids and places differ from step to step.
        """
        kind = _NUMBER.sub("#", message)
        met = {request_id: (kind, count) for request_id, count in num_outputs.items()}
        hopeless = [request_id for request_id, what in met.items() if self._last.get(request_id) == what]
        known = {request_id: what for request_id, what in self._last.items() if request_id in live} | met
        self._last = {request_id: what for request_id, what in known.items() if request_id not in hopeless}
        return hopeless


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
        self.num_recoveries += 1
        self.latest.appendleft(record)
