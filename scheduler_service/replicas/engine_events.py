"""What an engine tells whoever gives it requests: the face that it sees, and an epoch's end as a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from blockyard.errors import TRANSPORT_ORIGIN, BlockyardError, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from scheduler_service.core.recovery import Evacuated
    from scheduler_service.core.sequence import Group
    from scheduler_service.core.values import OwnerUpdate, SchedulerOutput
    from scheduler_service.replicas.engine import Engine
    from scheduler_service.replicas.facts import ModelFacts

_BREAKS = (Reason.NO_READY_WORKER, Reason.DRAINING, Reason.CLIENT_CANCELLED)
DRAINED = "the replica was drained"


def is_break(error: BlockyardError) -> bool:
    """Whether an epoch ended without anybody being to blame: by the process, the connection, or the worker's wish."""
    return error.reason in _BREAKS or TRANSPORT_ORIGIN.items() <= error.metadata.items()


class Loss(NamedTuple):
    """An epoch that broke.

    `in_hand` and `named`: the requests that the unanswered steps computed, and those that a refusal names, with their
    numbers of generated tokens. `evacuated`: all that were there, in order of precedence. `was_sound`: the worker had
    answered steps of the epoch as it should.
    """

    error: BlockyardError
    facts: ModelFacts
    in_hand: Mapping[str, int]
    named: Mapping[str, int]
    evacuated: list[Evacuated]
    was_sound: bool


class EngineEvents(Protocol):
    """Where requests come from and go to."""

    def dispatch(self) -> None:
        """Gives ready replicas what they have room for."""
        ...

    def on_step_scheduled(self, engine: Engine, output: SchedulerOutput) -> None:
        """Takes note of a step that is about to be sent."""
        ...

    def publish(self, updates: Mapping[str, OwnerUpdate]) -> None:
        """Takes what a step gave to each owner."""
        ...

    def on_requests_ended(self, groups: Iterable[Group]) -> None:
        """Takes note of requests that ended."""
        ...

    def on_worker_lost(self, engine: Engine, loss: Loss) -> None:
        """Takes all requests of a replica back."""
        ...

    def on_readiness_changed(self, engine: Engine) -> None:
        """Takes note that a replica became ready, or why it is not."""
        ...

    def may_claim(self, engine: Engine, incarnation: str) -> bool:
        """Whether a worker is no other replica's."""
        ...

    def may_serve(self, engine: Engine, facts: ModelFacts) -> bool:
        """Whether a model is that of all other replicas that serve."""
        ...

    def serves_without(self, engine: Engine) -> bool:
        """Whether another replica takes requests."""
        ...
