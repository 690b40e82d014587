"""Counts which requests workers died of: those in the unanswered steps each time. Knows no worker and no queue.

A death is counted against every request that the worker had in hand, and most are innocent. A new token clears one. Who
was there twice in a row is suspect, and runs without any other suspect, so that the third death decides.

A refusal that names its requests is a death of these alone.

A worker that answers what cannot be is not dead, and may be the one that is broken. That proves nothing against a
request unless the worker had answered others well: then it makes suspects, which have others tried before them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

SUSPECT_AFTER = 2
POISON_AFTER = 3


class _Record(NamedTuple):
    num_outputs: int
    num_deaths: int


class Deaths:
    """Counts deaths in a row for each live request."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def note(self, num_outputs: Mapping[str, int], live: Mapping[str, object], *, is_proof: bool = True) -> None:
        """Takes a death: the requests in unanswered steps with their tokens so far, and all that are live.

        Unless it `is_proof` that the worker died of one of them, it makes nobody more than a suspect.
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
        """Requests that are to run without another suspect."""
        return [name for name, record in self._records.items() if record.num_deaths >= SUSPECT_AFTER]

    @property
    def poison(self) -> list[str]:
        """Requests that are to fail."""
        return [name for name, record in self._records.items() if record.num_deaths >= POISON_AFTER]
