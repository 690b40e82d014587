"""Finds the requests to blame when a worker refuses steps again and again. Knows no worker and no queue.

A refusal is a bug of somebody's, and an epoch is begun again after it. If a request comes to the same refusal without a
new token in between, it would do so for ever.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.errors import BlockyardError
    from scheduler_service.core.values import SchedulerOutput

_NUMBER = re.compile(r"\d+")
_FIELD = re.compile(r"(new_sequences|forks|sequence_ids|num_new_tokens|appended_\w+)\[(\d+)\]")


def named_sequences(step: SchedulerOutput, error: BlockyardError) -> list[int]:
    """Finds the sequences of a step that a refusal names by the fields that are wrong; it may name none."""
    columns = {
        "new_sequences": [new.sequence_id for new in step.new_sequences],
        "forks": [fork.child_id for fork in step.forks],
        "sequence_ids": list(step.sequence_ids),
        "num_new_tokens": list(step.sequence_ids),
        "appended_sequence_ids": list(step.appended_sequence_ids),
        "appended_block_ids": list(step.appended_sequence_ids),
    }
    places = [_FIELD.match(violation.field) for violation in error.violations]
    found = [(columns.get(place[1], []), int(place[2])) for place in places if place]
    return [column[index] for column, index in found if index < len(column)]


def all_sequences(step: SchedulerOutput) -> list[int]:
    """Returns the sequences that a step brings, forks or computes."""
    new = [sequence.sequence_id for sequence in step.new_sequences]
    return [*new, *(fork.child_id for fork in step.forks), *step.sequence_ids]


class Refusals:
    """Remembers the last refusal that each live request met."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, int]] = {}

    def note(self, message: str, num_outputs: Mapping[str, int], live: Mapping[str, object]) -> list[str]:
        """Takes a refusal and the requests in it, with their tokens so far. Returns those that met it twice in a row.

        Numbers in the message do not count: ids and places differ from step to step.
        """
        kind = _NUMBER.sub("#", message)
        met = {request_id: (kind, count) for request_id, count in num_outputs.items()}
        hopeless = [request_id for request_id, what in met.items() if self._last.get(request_id) == what]
        known = {request_id: what for request_id, what in self._last.items() if request_id in live} | met
        self._last = {request_id: what for request_id, what in known.items() if request_id not in hopeless}
        return hopeless
