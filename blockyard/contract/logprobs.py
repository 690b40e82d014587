"""Log probabilities as they travel between worker, scheduler and gateway: token ids and numbers, no text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Candidates(NamedTuple):
    """Log probabilities at one position, as columns of equal length: the chosen token first, then the likeliest.

    `ranks` may be empty; the likeliest token has rank 1.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]


class PromptPiece(NamedTuple):
    """The log probabilities of a prompt's tokens from `first_position` on."""

    first_position: int
    candidates: list[Candidates]
