"""Calls for vectors, scores and labels, as values. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass

MAX_INPUTS = 2048
"""The limit of inputs or documents of a call."""

Input = str | tuple[int, ...]
"""A text, or token ids, to which no special tokens are added."""


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options that all calls share.

    `truncate_prompt_tokens`: inputs are truncated to so many tokens; -1: to the model's limit; None: an input that is
    too long is refused. `remaining_seconds`: the time until the client's deadline; None: no deadline.
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
    """Asks for vectors. `prompt_name`: one of the model's prompts, which goes before texts; None: the default one."""

    options: CallOptions
    inputs: tuple[Input, ...]
    dimensions: int | None = None
    normalise: bool = True
    prompt_name: str | None = None


@dataclass(frozen=True, slots=True)
class ScoreCall:
    """Asks how well documents answer queries: one query for all of them, or one for each.

    `top_n`: only so many documents are returned, best first; None: all, in their order.
    """

    options: CallOptions
    queries: tuple[Input, ...]
    documents: tuple[Input, ...]
    instruction: str = ""
    top_n: int | None = None


@dataclass(frozen=True, slots=True)
class ClassifyCall:
    """Asks for labels. `raw`: whether the head's numbers are returned unchanged instead of probabilities."""

    options: CallOptions
    inputs: tuple[Input, ...]
    raw: bool = False
