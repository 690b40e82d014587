"""Edits of logits, float32 [rows, vocabulary], in place, in torch on any device.

Plain torch, and no ops of a backend. Owns what a mask, a bias and a penalty do; the sampler owns their order. Each
takes columns of one length that name a row and a token each, so that its cost is that of the named tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# The most that a penalty makes of a logit: divided by the lowest temperature it is finite still, and infinity, which
# equals itself plus anything, would leave the filters nothing to keep.
_MAX_LOGIT = 1e30


def allow_only(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Makes all other tokens of these rows impossible, in place: int64 columns of the same length."""
    allowed = logits[rows, token_ids]
    logits[rows.unique()] = float("-inf")
    logits[rows, token_ids] = allowed


def mask_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Makes tokens impossible, in place: `rows` and `token_ids` are int64 columns of the same length."""
    logits[rows, token_ids] = float("-inf")


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """Adds to the logits of tokens, in place: columns of the same length; each (row, token) stands once."""
    logits[rows, token_ids] += bias


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    token_ids: Tensor,
    output_counts: Tensor,
    penalties: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Applies the repetition, frequency and presence penalty, in place and in this order.

    Args:
        logits: float32 [rows, vocabulary].
        rows, token_ids: int64 [n]: every token that stands in the prompt or the output of a row, once.
        output_counts: float32 [n]: how often it stands in the output; 0 for a token of the prompt alone.
        penalties: repetition, frequency, presence: float32 [n], each token's row's.
    """
    repetition, frequency, presence = penalties
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition).clamp_(max=_MAX_LOGIT)
    values = values - frequency * output_counts
    logits[rows, token_ids] = values - presence * (output_counts > 0)
