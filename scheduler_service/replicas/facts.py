"""What a scheduler knows of a replica and its start, as values. Knows no messages and no connections."""

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
    """Where the ranks of a group that is being formed meet, and what they show there."""

    address: str
    secret: bytes


class StartPhase(Enum):
    """What a worker does to be set up."""

    INIT_DEVICE = "INIT_DEVICE"
    LOAD_MODEL = "LOAD_MODEL"
    COUNT_BLOCKS = "COUNT_BLOCKS"
    INITIALIZE_CACHE = "INITIALIZE_CACHE"


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far the start of a worker is; bytes are those of LOAD_MODEL."""

    phase: StartPhase
    load: LoadProgress = LoadProgress(0, 0)


def repeats(before: ModelFacts, after: ModelFacts) -> bool:
    """Whether what one replica began another goes on with exactly."""
    return before.determinism_id == after.determinism_id and before.batch_invariant and after.batch_invariant


def is_same_model(one: ModelFacts, other: ModelFacts) -> bool:
    """Whether two replicas have one model, whatever their memory and their results' last bits."""
    return (one.model_digest, one.vocab_size, one.task) == (other.model_digest, other.vocab_size, other.task)


def combine(replicas: Sequence[ModelFacts]) -> ModelFacts:
    """What holds for each of several replicas, at least one."""
    first = replicas[0]
    return replace(
        first,
        max_model_len=min(facts.max_model_len for facts in replicas),
        max_prompt_len=min(facts.max_prompt_len for facts in replicas),
        batch_invariant=all(facts == first or repeats(first, facts) for facts in replicas) and first.batch_invariant,
    )
