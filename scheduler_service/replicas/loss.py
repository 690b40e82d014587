"""The end of an epoch as a value: why it broke, and what its requests lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.contract.scheduling import ModelFacts
    from scheduler_service.core.recovery import Evacuated

_BREAKS = (Reason.NO_READY_WORKER, Reason.DRAINING, Reason.GROUP_BROKEN, Reason.CLIENT_CANCELLED)
DRAINED = "the replica was drained"


def is_break(error: BlockyardError) -> bool:
    """Whether an epoch ended and no request is to blame: by the process, the connection, or the worker's wish."""
    return error.reason in _BREAKS or TRANSPORT_ORIGIN.items() <= error.metadata.items()


class Loss(NamedTuple):
    """An epoch that broke.

    `in_hand`: the requests that the epoch may have ended because of; `refused`: those of a step that was refused; both
    with their numbers of generated tokens. Where a refusal names requests, both are these. `evacuated`: all that were
    there, in order of precedence. `was_sound`: the worker had answered steps of the epoch as it should.
    """

    error: BlockyardError
    facts: ModelFacts
    in_hand: Mapping[str, int]
    refused: Mapping[str, int]
    evacuated: list[Evacuated]
    was_sound: bool
