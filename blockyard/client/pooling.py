"""Options of both clients' calls for embeddings, scores and labels."""

from __future__ import annotations

from typing import TypedDict


class PoolingOptions(TypedDict, total=False):
    """Options of all pooling calls. An absent option has the API's default (in brackets)."""

    request_id: str
    """An id of your choice, for `cancel` and the logs. The same call sent again with its id has the same answer.
    [made by the gateway]"""
    model: str
    """A name from `list_models`. [the model]"""
    priority: int
    """The lowest number runs first, if the scheduler's policy is priority. [0]"""
    max_queue_seconds: float
    """Seconds that the call may wait for its first step before it fails with QUEUE_DEADLINE. [no limit]"""
    truncate_prompt_tokens: int
    """Tokens to keep of each input; -1: as many as the model takes. [inputs that are too long are refused]"""
    add_special_tokens: bool
    """Tokenize texts with the model's special tokens. [True]"""


class EmbedOptions(PoolingOptions, total=False):
    dimensions: int
    """Return only this many leading numbers of each vector, for models trained for it. [all]"""
    normalise: bool
    """Scale vectors to length 1. [True]"""
    prompt_name: str
    """Name of a prompt in the model's files to put before each text. [the model's default prompt]"""


class ScoreOptions(PoolingOptions, total=False):
    instruction: str
    """The purpose of the query, for models that take an instruction. [the model's own]"""
    top_n: int
    """Return only this many of the best documents, the best first. [all, in the order of the documents]"""


class ClassifyOptions(PoolingOptions, total=False):
    raw: bool
    """Return the head's raw outputs instead of probabilities. [False]"""
