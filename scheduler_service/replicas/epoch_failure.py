"""The failure of an epoch: why it broke, which requests may be to blame, and what all its requests lost."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.contract.scheduling import ModelFacts
    from scheduler_service.core.recovery import Evacuated
    from scheduler_service.core.values import SchedulerOutput


# The longest waits between two attempts. A worker that answers with an error is asked again, since a folder can be
# repaired, but rarely, since a set-up is heavy work. A worker that restarts makes clients wait: it is asked more often.
UNREACHABLE_RETRY_SECONDS = 0.25

LAST_RETRY_SECONDS = 1.0

LAST_FAILURE_RETRY_SECONDS = 10.0


class NotReady(Exception):
    """The replica cannot be set up now; the message says why.

    `retry_seconds`: the longest wait before the next attempt. `needs_repair`: only an operator can help.
    """

    def __init__(self, message: str, retry_seconds: float = LAST_RETRY_SECONDS, *, needs_repair: bool = False) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.needs_repair = needs_repair


class Unreachable(NotReady):
    """No worker answers at the address."""

    def __init__(self, message: str) -> None:
        super().__init__(message, UNREACHABLE_RETRY_SECONDS)


class Misconfigured(NotReady):
    """These worker processes can never serve this configuration."""

    def __init__(self, message: str) -> None:
        super().__init__(message, needs_repair=True)


class Unusable(Exception):
    """The first worker cannot be set up, and the settings do not wait for a repair; the message says why."""


_BREAKS = (Reason.NO_READY_WORKER, Reason.DRAINING, Reason.GROUP_BROKEN, Reason.CLIENT_CANCELLED)

_FIELD = re.compile(r"(new_sequences|forks|sequence_ids|num_new_tokens|max_draft_tokens|appended_\w+)\[(\d+)\]")

DRAINED = "the replica was drained"


def is_break(error: BlockyardError) -> bool:
    """Whether the epoch ended by the process, the connection or the worker's stop, so that no request is to blame."""
    return error.reason in _BREAKS or TRANSPORT_ORIGIN.items() <= error.metadata.items()


class EpochFailure(NamedTuple):
    """An epoch that broke.

    `in_hand`: the requests that may have broken the epoch; `refused`: those of a refused step; both with their numbers
    of generated tokens. If a refusal names requests, both are these. `evacuated`: all requests of the replica, in order
    of precedence. `was_sound`: the worker had answered steps of the epoch correctly.
    """

    error: BlockyardError
    facts: ModelFacts
    in_hand: Mapping[str, int]
    refused: Mapping[str, int]
    evacuated: list[Evacuated]
    was_sound: bool


def named_sequences(step: SchedulerOutput, error: BlockyardError) -> list[int]:
    """Finds the sequences of a step that a refusal names by its violations; it may name none."""
    columns = {
        "new_sequences": [new.sequence_id for new in step.new_sequences],
        "forks": [fork.child_id for fork in step.forks],
        "sequence_ids": list(step.sequence_ids),
        "num_new_tokens": list(step.sequence_ids),
        "max_draft_tokens": list(step.sequence_ids),
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
