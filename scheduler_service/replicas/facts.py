"""Values about a replica and its start. Knows no messages and no connections."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from blockyard.contract.workers import LoadProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.scheduling import ModelFacts


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where the ranks of a new group meet, and the secret that they show there."""

    address: str
    secret: bytes


class StartPhase(Enum):
    INIT_DEVICE = "INIT_DEVICE"
    LOAD_MODEL = "LOAD_MODEL"
    COUNT_BLOCKS = "COUNT_BLOCKS"
    INITIALIZE_CACHE = "INITIALIZE_CACHE"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """The progress of a worker's set-up. `load`: the bytes of LOAD_MODEL."""

    phase: StartPhase
    load: LoadProgress = LoadProgress(0, 0)


def repeats(before: ModelFacts, after: ModelFacts) -> bool:
    """Whether the second replica continues a request of the first one bit for bit."""
    return before.determinism_id == after.determinism_id and before.batch_invariant and after.batch_invariant


def is_same_model(one: ModelFacts, other: ModelFacts) -> bool:
    """Whether two replicas have the same model, though their memory and rounding may differ."""
    return (one.model_digest, one.vocab_size, one.task) == (other.model_digest, other.vocab_size, other.task)


def combine(replicas: Sequence[ModelFacts]) -> ModelFacts:
    """Returns the facts that hold for all of one or more replicas."""
    first = replicas[0]
    return replace(
        first,
        max_model_len=min(facts.max_model_len for facts in replicas),
        max_prompt_len=min(facts.max_prompt_len for facts in replicas),
        batch_invariant=all(facts == first or repeats(first, facts) for facts in replicas) and first.batch_invariant,
    )
