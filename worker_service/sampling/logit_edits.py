"""Edits of logits, float32 [rows, vocabulary], in place, in torch on any device.

Plain torch, without ops of a backend. Defines masks, biases and penalties; the sampler defines their order. Each edit
takes columns of equal length whose entries name a row and a token, so that its cost grows with the named tokens only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# The largest logit after a penalty. Divided by the lowest temperature it is still finite; with an infinite logit the
# filters could keep no token.
_MAX_LOGIT = 1e30


def allow_only(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Makes all tokens of these rows impossible except `token_ids`, in place: int64 columns of the same length."""
    allowed = logits[rows, token_ids]
    logits[rows.unique()] = float("-inf")
    logits[rows, token_ids] = allowed


def mask_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Makes tokens impossible, in place: `rows` and `token_ids` are int64 columns of the same length."""
    logits[rows, token_ids] = float("-inf")


def add_bias(logits: Tensor, rows: Tensor, token_ids: Tensor, bias: Tensor) -> None:
    """Adds to the logits of tokens, in place: columns of the same length, with distinct (row, token) pairs."""
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
        rows, token_ids: int64 [n]: the distinct tokens in the prompt and the output of each row.
        output_counts: float32 [n]: the count of each token in the output; 0 if it is only in the prompt.
        penalties: repetition, frequency, presence: float32 [n], the penalties of each token's row.
    """
    repetition, frequency, presence = penalties
    values = logits[rows, token_ids]
    values = torch.where(values > 0, values / repetition, values * repetition).clamp_(max=_MAX_LOGIT)
    values = values - frequency * output_counts
    logits[rows, token_ids] = values - presence * (output_counts > 0)
