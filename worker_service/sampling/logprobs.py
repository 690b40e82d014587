"""Log probabilities of tokens as columns: of sampled tokens, of prompt tokens, and of the candidates of beams.

Knows neither sequences nor how tokens are chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from worker_service.step import NO_LOGPROBS, Array, Logprobs, no_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard_kernels.sampling import SamplingOps, TokenLogprobs


def of_tokens(ops: SamplingOps, logits: Tensor, rows: Array, token_ids: Array, num_best: Array) -> Logprobs:
    """Computes the log probability of each given token, and of the best tokens at its place.

    Args:
        ops: the sampling ops of the logits' device.
        logits: float32 [any, vocabulary].
        rows: [n], the row of logits for each token.
        token_ids: [n], the given tokens.
        num_best: [n], the number of best tokens, at most the vocabulary's size.
    """
    most = int(num_best.max(initial=0))
    found = ops.token_logprobs(logits, rows, token_ids, most)
    places = np.broadcast_to(np.arange(1, most + 1), (len(rows), most))
    return _columns(num_best + 1, found, np.concatenate([found.ranks[:, None], places], 1))


def of_best(ops: SamplingOps, logits: Tensor, rows: Array, num_best: Array) -> Logprobs:
    """Computes log probabilities of the best tokens of rows [n], without ranks. Impossible tokens are left out."""
    found = ops.token_logprobs(logits, rows, None, int(num_best.max(initial=0)))
    num_possible = np.count_nonzero(found.logprobs > -np.inf, -1)
    return _columns(np.minimum(num_best, num_possible), found)


def _columns(num_candidates: Array, found: TokenLogprobs, ranks: Array | None = None) -> Logprobs:
    """Takes the first `num_candidates` [n] candidates of each row of tables [n, widest]."""
    is_asked = np.arange(found.token_ids.shape[1]) < num_candidates[:, None]
    kept_ranks = no_ids() if ranks is None else ranks[is_asked]
    return Logprobs(num_candidates, found.token_ids[is_asked], found.logprobs[is_asked], kept_ranks)


def concatenate(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(
        np.concatenate([part.num_candidates for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )


def in_order(parts: Sequence[tuple[Array, Logprobs]]) -> Logprobs:
    """Joins columns with ranks of tokens at known places, in the order of their places."""
    if not parts:
        return NO_LOGPROBS
    whole = concatenate([columns for _, columns in parts])
    order = np.argsort(np.concatenate([places for places, _ in parts]))
    begins, counts = whole.num_candidates.cumsum() - whole.num_candidates, whole.num_candidates[order]
    within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    taken = begins[order].repeat(counts) + within
    return Logprobs(counts, whole.token_ids[taken], whole.logprobs[taken], whole.ranks[taken])


def split(whole: Logprobs, lengths: Sequence[int]) -> list[Logprobs]:
    """Cuts columns with ranks into parts of the given numbers of tokens."""
    ends = np.cumsum(lengths)[:-1]
    counts = np.split(whole.num_candidates, ends)
    # The end of each part's candidates.
    places = np.cumsum([count.sum() for count in counts])[:-1]
    columns = [np.split(column, places) for column in (whole.token_ids, whole.logprobs, whole.ranks)]
    return [Logprobs(*part) for part in zip(counts, *columns, strict=True)]
