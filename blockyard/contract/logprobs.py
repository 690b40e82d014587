"""Log probabilities as they travel between worker, scheduler and gateway: token ids and numbers, no text."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Candidates(NamedTuple):
    """The log probabilities in one token's place, in columns of one length: the token's own first, then the likeliest.

    `ranks` may be empty; the likeliest token has rank 1.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    ranks: Sequence[int]


class PromptPiece(NamedTuple):
    """The log probabilities of a prompt's tokens from `first_position` on."""

    first_position: int
    candidates: list[Candidates]
