"""The kinds of pooling: numbers computed from a prompt instead of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.events import Usage


class PoolingKind(StrEnum):
    """How a sequence's hidden rows are pooled; see pooling.proto."""

    LAST = "last"
    FIRST = "first"
    MEAN = "mean"
    TOKENS = "tokens"
    CLASSIFY = "classify"
    LABEL_LOGITS = "label_logits"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What to compute from a prompt instead of generating tokens; see Pooling in pooling.proto.

    `kind` is None for a value of a later version that this one does not know.
    """

    kind: PoolingKind | None
    label_token_ids: tuple[int, ...] = ()
    normalise: bool = False
    dimensions: int = 0
    leaves_raw: bool = False
    second_from: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """The model and the cost of a call. `usage` has the tokens of all its inputs."""

    request_id: str
    model: str
    usage: Usage
    determinism_id: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings(PoolingFacts):
    """A vector for each input, and what made them."""

    vectors: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A document, by its place in the call, and how well it answers: more is better."""

    index: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores(PoolingFacts):
    """How well documents answer, and what says so. Equal scores are in the order of the documents."""

    documents: list[ScoredDocument]


@dataclass(frozen=True, slots=True)
class Classification:
    """How well each label suits a text, and the name of the likeliest; of equal ones, of the first."""

    probabilities: list[float]
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Classifications(PoolingFacts):
    """The labels of each input, the names of all labels, and what says so."""

    classifications: list[Classification]
    labels: Sequence[str]
