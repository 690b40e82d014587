"""The kinds of numbers that are made of a prompt instead of tokens after it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PoolingKind(StrEnum):
    """The kinds of numbers that are made of a sequence's rows: see pooling.proto."""

    LAST = "last"
    FIRST = "first"
    MEAN = "mean"
    TOKENS = "tokens"
    CLASSIFY = "classify"
    LABEL_LOGITS = "label_logits"


@dataclass(frozen=True, slots=True)
class Pooling:
    """What to make of a prompt instead of tokens after it: see Pooling in pooling.proto.

    `kind` is None for one that a later version knows.
    """

    kind: PoolingKind | None
    label_token_ids: tuple[int, ...] = ()
    normalise: bool = False
    dimensions: int = 0
    leaves_raw: bool = False
    second_from: int = 0
