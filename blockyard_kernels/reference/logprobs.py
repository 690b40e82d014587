"""Log probabilities, the best tokens and ranks of rows of logits, in torch.

As in `sampling`, a row's result depends on its own logits only. torch's `log_softmax` has this property. torch's
`logsumexp` does not: it splits the sum of a single row among threads, which rounds differently from the same row in a
batch (4 of 60 rows of 152,064 logits, with two threads).
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockyard_kernels.sampling import TokenLogprobs


def log_softmax(logits: Tensor) -> Tensor:
    """Computes the log probabilities of all tokens: float32 [rows, vocabulary] -> the same."""
    return torch.log_softmax(logits, -1)


def best_tokens(scores: Tensor, count: int) -> Tensor:
    """Picks the best tokens of each row, best first, ties by the lower id.

    Args:
        scores: float32 [rows, vocabulary], no NaN.
        count: how many, from 0 to the vocabulary's size.

    Returns:
        Token ids, int64 [rows, count].
    """
    if count == 0:
        return torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    values, token_ids = scores.topk(count, dim=-1)
    threshold = values[:, -1:]
    # torch chooses freely among tokens that tie at the last place.
    whims = ((scores == threshold).sum(-1) > (values == threshold).sum(-1)).nonzero()[:, 0]
    if whims.numel():
        token_ids[whims] = _with_lowest_ties(scores[whims], values[whims], token_ids[whims])
    token_ids, order = token_ids.sort(dim=-1)
    order = values.gather(1, order).sort(dim=-1, descending=True, stable=True).indices
    return token_ids.gather(1, order)


def _with_lowest_ties(scores: Tensor, values: Tensor, token_ids: Tensor) -> Tensor:
    """Replaces the tokens that tie at the last place, a suffix of each row, by the tied tokens with the lowest ids."""
    vocab_size, count = scores.shape[1], values.shape[1]
    # A distinct score for each tied token: the lower its id, the larger the score.
    ties = torch.where(scores == values[:, -1:], torch.arange(vocab_size, 0, -1, device=scores.device), 0)
    lowest = vocab_size - ties.topk(count, dim=-1).values
    is_above = values > values[:, -1:]
    place = torch.arange(count, device=scores.device) - is_above.sum(-1, keepdim=True)
    return torch.where(is_above, token_ids, lowest.gather(1, place.clamp(min=0)))


def ranks(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Returns the rank of each row's token in the order of `best_tokens`, from 1: ids int64 [rows] -> int64 [rows]."""
    chosen = logits.gather(1, token_ids[:, None])
    comes_before = torch.arange(logits.shape[1], device=logits.device) < token_ids[:, None]
    return ((logits > chosen) | ((logits == chosen) & comes_before)).sum(-1) + 1


def token_logprobs(logits: Tensor, token_ids: Tensor | None, num_best: int) -> TokenLogprobs:
    """See `blockyard_kernels.sampling.SamplingOps.token_logprobs`, of all rows."""
    candidates = best_tokens(logits, num_best)
    if token_ids is not None:
        candidates = torch.cat([token_ids[:, None], candidates], 1)
    values = log_softmax(logits).gather(1, candidates)
    columns = candidates.cpu().numpy(), values.cpu().numpy()
    if token_ids is None:
        return TokenLogprobs(*columns)
    return TokenLogprobs(*columns, ranks(logits, token_ids).cpu().numpy())
