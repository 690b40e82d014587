"""The kinds of pooling: numbers computed from a prompt instead of generated tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
