"""Calls for vectors, scores and labels and their answers, as values. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MAX_INPUTS = 2048
"""Inputs, or documents, of a call."""

Input = str | tuple[int, ...]
"""A text, or token ids, to which nothing is added."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """What all calls have.

    `truncate_prompt_tokens`: so many tokens of an input are its all; -1: as many as the model takes; None: one that is
    too long is refused. `remaining_seconds`: until the client's own deadline.
    """

    request_id: str = ""
    model: str = ""
    tenant: str = ""
    priority: int = 0
    max_queue_seconds: float | None = None
    remaining_seconds: float | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class EmbedCall:
    """Asks for vectors. `prompt_name`: of the model's files, to put before texts; None: the one that they name."""

    options: CallOptions
    inputs: tuple[Input, ...]
    dimensions: int | None = None
    normalise: bool = True
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """Asks how well documents answer queries: one query for all of them, or one for each.

    `top_n`: the so many best alone, best first; None: all, in their order.
    """

    options: CallOptions
    queries: tuple[Input, ...]
    documents: tuple[Input, ...]
    instruction: str = ""
    top_n: int | None = None


@dataclass(frozen=True, slots=True)
class ClassifyCall:
    """Asks for labels. `raw`: the head's numbers as they are, no probabilities."""

    options: CallOptions
    inputs: tuple[Input, ...]
    raw: bool = False


class CallFacts(NamedTuple):
    """What made the numbers of a call. The tokens are those of all its inputs."""

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    determinism_id: str
    warnings: tuple[str, ...] = ()


class Embeddings(NamedTuple):
    """A vector for each input: float32, little endian."""

    vectors: list[bytes]
    facts: CallFacts


class ScoredDocument(NamedTuple):
    """A document, by its place in the call, and how well it answers; more is better."""

    place: int
    score: float


class Scores(NamedTuple):
    """The scores of documents; equal ones in the order of the documents."""

    documents: list[ScoredDocument]
    facts: CallFacts


class Classification(NamedTuple):
    """A number for each label, and the name of the first that has the greatest."""

    probabilities: list[float]
    label: str


class Classifications(NamedTuple):
    """The labels of each input, and the labels' names."""

    classifications: list[Classification]
    labels: tuple[str, ...]
    facts: CallFacts
