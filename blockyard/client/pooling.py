"""Vectors, scores and labels of texts: options and answers of both clients as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from blockyard.client.results import Usage


class PoolingOptions(TypedDict, total=False):
    """Options of a call for numbers. One that is absent takes the API's default (in brackets)."""

    request_id: str
    """A name of your choice, for `cancel` and the logs. The same call, sent again under its name, has the same answer.
    [made by the gateway]"""
    model: str
    """A name from `list_models`. [the model]"""
    priority: int
    """Less is sooner, where the scheduler's policy is by priority. [0]"""
    max_queue_seconds: float
    """How long it may wait for its first step; then it fails with QUEUE_DEADLINE. [as long as it takes]"""
    truncate_prompt_tokens: int
    """Keep so many tokens of each input, -1: as many as the model takes. [one that is too long is refused]"""
    add_special_tokens: bool
    """Tokenize texts with the model's special tokens. [True]"""


class EmbedOptions(PoolingOptions, total=False):
    """Options of `embed`."""

    dimensions: int
    """The first so many numbers of each vector alone, for models trained for it. [all]"""
    normalise: bool
    """Make vectors of length 1. [True]"""
    prompt_name: str
    """A prompt of the model's files, by its name, to put before each text. [the one that they name as theirs]"""


class ScoreOptions(PoolingOptions, total=False):
    """Options of `score`."""

    instruction: str
    """What the query is for, for models that take one. [the model's own]"""
    top_n: int
    """Tell the so many best alone, the best first. [all, in the order of the documents]"""


class ClassifyOptions(PoolingOptions, total=False):
    """Options of `classify`."""

    raw: bool
    """Tell the head's numbers as they are, no probabilities. [False]"""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """A vector for each input, and what made them."""

    vectors: list[list[float]]
    request_id: str
    model: str
    usage: Usage
    determinism_id: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ScoredDocument:
    """A document, by its place in the call, and how well it answers: more is better."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class Scores:
    """How well documents answer, and what says so."""

    documents: list[ScoredDocument]
    request_id: str
    model: str
    usage: Usage
    determinism_id: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Classification:
    """How well each label suits a text, and the name of the likeliest."""

    probabilities: list[float]
    label: str


@dataclass(frozen=True, slots=True)
class Classifications:
    """The labels of each input, the names of all labels, and what says so."""

    classifications: list[Classification]
    labels: list[str]
    request_id: str
    model: str
    usage: Usage
    determinism_id: str
    warnings: tuple[str, ...] = ()
