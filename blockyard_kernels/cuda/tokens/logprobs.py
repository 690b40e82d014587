"""Log probabilities, ranks and the best tokens of rows of logits, in Triton. See `blockyard_kernels.sampling`.

One program computes a row. Its mass is a sum of integers whose logarithm is taken in float64, so that each log
probability is rounded only once.
"""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from blockyard_kernels.cuda import launch_table
from blockyard_kernels.cuda.tokens.order import (
    IMPOSSIBLE,
    end_of_ties,
    load_logits,
    mass_of,
    order_of,
    passes_bound,
    search,
    unit_of_weight,
    visit_tokens,
)

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["num_best"])
def _measure(
    logits, rows, given, normalizers, ranks, best_ids, size, num_best, unit,
    HAS_GIVEN: tl.constexpr, HAS_BEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds a row's log-sum-exp, the rank of the given token, and the ids of the `num_best` best tokens, ascending."""
    number = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(rows + number) * size
    maxima = tl.zeros([BLOCK], tl.float32) + float("-inf")
    for first in range(0, size, BLOCK):
        token_ids, inside = visit_tokens(rows, first, size, False, BLOCK)
        maxima = tl.maximum(maxima, load_logits(row, token_ids, inside))
    best = tl.max(maxima, 0)
    mass = mass_of(row, rows, size, size, 1.0, IMPOSSIBLE, 0, best, unit, False, BLOCK)
    tl.store(normalizers + number, best.to(tl.float64) + tl.log(mass.to(tl.float64) / unit))
    if HAS_GIVEN:
        token_id = tl.load(given + number)
        order = order_of(tl.load(row + token_id))
        before = tl.zeros([BLOCK], tl.int32)
        for first in range(0, size, BLOCK):
            token_ids, inside = visit_tokens(rows, first, size, False, BLOCK)
            before += passes_bound(load_logits(row, token_ids, inside), token_ids, order, token_id).to(tl.int32)
        tl.store(ranks + number, tl.sum(before, 0).to(tl.int64) + 1)
    if HAS_BEST:
        low, target = tl.zeros([], tl.int32) + IMPOSSIBLE, tl.zeros([], tl.int32) + num_best
        high = order_of(best)
        bound, rest = search(row, rows, size, size, 1.0, low, high, target, best, unit, False, False, BLOCK)
        end = end_of_ties(row, rows, size, size, 1.0, bound, rest, False, BLOCK)
        found = best_ids + number * num_best
        for first in range(0, size, BLOCK):
            token_ids, inside = visit_tokens(rows, first, size, False, BLOCK)
            passes = passes_bound(load_logits(row, token_ids, inside), token_ids, bound, end).to(tl.int32)
            tl.store(found + tl.cumsum(passes, 0) - 1, token_ids.to(tl.int64), passes != 0)
            found += tl.sum(passes, 0)


def token_logprobs(logits: Tensor, rows: Tensor, given: Tensor | None, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Computes log probabilities on the device, without waiting for it.

    Args:
        logits: float32 [R, vocabulary].
        rows: indices of rows, int64 [n], at least one.
        given: token ids int64 [n] that come first among the candidates, or None.
        num_best: number of best tokens, which follow among the candidates.

    Returns:
        Candidates int64 [n, width], their log probabilities float32 [n, width], and the given tokens' ranks int64 [n].
    """
    (num_rows,), size = rows.shape, logits.shape[1]
    normalizers, ranks = rows.new_empty(num_rows, dtype=torch.float64), rows.new_empty(num_rows)
    best = rows.new_empty(num_rows, num_best)
    arguments = (logits, rows, rows if given is None else given, normalizers, ranks, best, size, num_best)
    options = launch_table.FILTERS.options
    _measure[(num_rows,)](*arguments, unit_of_weight(size), given is not None, num_best > 0, **options)
    # The best tokens are in order of their ids, so that a stable sort orders ties by id.
    order = logits[rows[:, None], best].sort(dim=-1, descending=True, stable=True).indices
    candidates = best.gather(1, order)
    if given is not None:
        candidates = torch.cat([given[:, None], candidates], 1)
    logprobs = logits[rows[:, None], candidates].double().sub_(normalizers[:, None]).float()
    return candidates, logprobs, ranks
