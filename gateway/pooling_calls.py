"""Calls for vectors, scores and labels, as values. Knows no messages."""

from __future__ import annotations

from dataclasses import dataclass

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
