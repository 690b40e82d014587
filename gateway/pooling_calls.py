"""Calls for vectors, scores and labels, as values. Knows no protobuf messages."""

from __future__ import annotations

from dataclasses import dataclass

MAX_INPUTS = 2048
"""The most inputs or documents of a call."""

Input = str | tuple[int, ...]
"""A text, or token ids. No special tokens are added to token ids."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options that all pooling calls share.

    `truncate_prompt_tokens`: the number of tokens to which inputs are truncated; -1: the model's limit; None: inputs
    that are too long are refused. `remaining_seconds`: the time until the client's deadline; None: no deadline.
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
    """Asks for vectors. `prompt_name`: the model's prompt to put before texts; None: its default prompt."""

    options: CallOptions
    inputs: tuple[Input, ...]
    dimensions: int | None = None
    normalise: bool = True
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """Asks how well documents answer queries: one query for all documents, or one query for each.

    `top_n`: the number of documents to return, best first; None: all documents, in their order.
    """

    options: CallOptions
    queries: tuple[Input, ...]
    documents: tuple[Input, ...]
    instruction: str = ""
    top_n: int | None = None


@dataclass(frozen=True, slots=True)
class ClassifyCall:
    """Asks for labels. `raw`: whether to return the head's raw logits instead of probabilities."""

    options: CallOptions
    inputs: tuple[Input, ...]
    raw: bool = False
