"""The answers of the calls for embeddings, scores and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.events import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """The model and the token usage of a call. `usage` counts all inputs."""

    request_id: str
    model: str
    usage: Usage
    determinism_id: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings(PoolingFacts):
    """A vector for each input, in the order of the inputs."""

    vectors: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A document's index in the call, and its score: higher is better."""

    index: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(PoolingFacts):
    """The scored documents. Documents with equal scores keep their order in the call."""

    documents: list[ScoredDocument]


@dataclass(frozen=True, slots=True)
class Classification:
    """The probability of each label for a text, and the likeliest label; of equal ones the first."""

    probabilities: list[float]
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifications(PoolingFacts):
    """The classification of each input, and the names of all labels."""

    classifications: list[Classification]
    labels: Sequence[str]
