"""Options of the calls for vectors, scores and labels of both clients."""

from __future__ import annotations

from typing import TypedDict


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
    dimensions: int
    """The first so many numbers of each vector alone, for models trained for it. [all]"""
    normalise: bool
    """Make vectors of length 1. [True]"""
    prompt_name: str
    """A prompt of the model's files, by its name, to put before each text. [the one that they name as theirs]"""


class ScoreOptions(PoolingOptions, total=False):
    instruction: str
    """What the query is for, for models that take one. [the model's own]"""
    top_n: int
    """Tell the so many best alone, the best first. [all, in the order of the documents]"""


class ClassifyOptions(PoolingOptions, total=False):
    raw: bool
    """Tell the head's numbers as they are, no probabilities. [False]"""
