"""Log probabilities of tokens as columns: of chosen ones, of those of a prompt, of the candidates of beams.

Knows neither sequences nor how tokens are chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kernels.reference import logprobs as arithmetic
from worker_service.step import Logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_service.step import Array


def of_tokens(logits: Tensor, token_ids: Tensor, num_best: Array) -> Logprobs:
    """Tells of tokens and of the best ones beside each.

    Args:
        logits: float32 [n, vocabulary]: what the model says of each token's place.
        token_ids: int64 [n], on the same device.
        num_best: [n], how many of the best, at most the vocabulary's size.
    """
    best = arithmetic.best_tokens(logits, int(num_best.max(initial=0)))
    candidates = torch.cat([token_ids[:, None], best], 1)
    logprobs = arithmetic.log_softmax(logits).gather(1, candidates)
    places = torch.arange(1, best.shape[1] + 1, device=logits.device).expand_as(best)
    ranks = torch.cat([arithmetic.ranks(logits, token_ids)[:, None], places], 1)
    return _columns(num_best + 1, candidates, logprobs, ranks)


def of_best(logits: Tensor, num_best: Array) -> Logprobs:
    """Tells of the best tokens of each row [n, vocabulary], without ranks; tokens that are impossible are left out."""
    scores = arithmetic.log_softmax(logits)
    best = arithmetic.best_tokens(scores, int(num_best.max(initial=0)))
    logprobs = scores.gather(1, best)
    num_possible = (logprobs > float("-inf")).sum(-1).cpu().numpy()
    return _columns(np.minimum(num_best, num_possible), best, logprobs)


def _columns(num_candidates: Array, token_ids: Tensor, logprobs: Tensor, ranks: Tensor | None = None) -> Logprobs:
    """Takes the first candidates of each row of tables [n, widest]."""
    is_asked = np.arange(token_ids.shape[1]) < num_candidates[:, None]
    tables = [token_ids, logprobs] if ranks is None else [token_ids, logprobs, ranks]
    return Logprobs(num_candidates, *(table.cpu().numpy()[is_asked] for table in tables))


def concatenate(parts: Sequence[Logprobs]) -> Logprobs:
    """Joins columns, those of at least one part."""
    return Logprobs(
        np.concatenate([part.num_candidates for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def split(whole: Logprobs, lengths: Sequence[int]) -> list[Logprobs]:
    """Cuts columns that have ranks into those of so many tokens each."""
    ends = np.cumsum(lengths)[:-1]
    counts = np.split(whole.num_candidates, ends)
    # Where the candidates of each part end.
    places = np.cumsum([count.sum() for count in counts])[:-1]
    columns = [np.split(column, places) for column in (whole.token_ids, whole.logprobs, whole.ranks)]
    return [Logprobs(*part) for part in zip(counts, *columns, strict=True)]
