"""The order of a row's tokens, in Triton: what passes a bound, how much that weighs, and which bound a share has.

Tokens are ordered by value (logit over temperature), the largest first, ties by the lower id. The first tokens of that
order are told by a bound: a value, by its order among floating-point numbers, and the end of the ids that pass at just
that value. Bounds are found by bisection, each pass of which moves to a value that the row holds. Masses are sums of
integers, which no order of summation can change. Knows no filters; a function looks at one row.
"""
# Triton's functions are in a language of their own, of which pyright sees the syntax, and calls take more and other
# arguments than their parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

# `order_of` what is impossible.
IMPOSSIBLE = tl.constexpr(-0x7F800001)
# Tokens of which the largest logit is known, so that those which cannot pass are not looked at.
GROUP = tl.constexpr(64)
# The largest sum of weights, as a power of 2.
MASS_BITS = 62


def unit_of_weight(vocab_size: int) -> float:
    """Returns how many units a row's best token weighs: so many that no sum over the vocabulary overflows."""
    return 2.0 ** (MASS_BITS - vocab_size.bit_length())


@triton.jit
def order_of(values):
    """Returns integers (int32) of the order of floating-point numbers; 0 and -0 are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row, token_ids, inside):
    """Loads logits; impossible is what is not inside, or not a number."""
    logits = tl.load(row + token_ids, inside, float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def visit_tokens(groups, first, count, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns ids of tokens from the place `first` on, of `count` or of listed groups, and which of them there are."""
    places = first + tl.arange(0, BLOCK)
    inside = places < count
    if LISTED:
        return tl.load(groups + places // GROUP, inside, 0) * GROUP + places % GROUP, inside
    return places, inside


@triton.jit
def weigh(values, best, unit):
    """Returns e to the power of value - best in units: int64, rounded down."""
    return (tl.exp(values - best) * unit).to(tl.int64)


@triton.jit
def passes_bound(values, token_ids, order, end):
    """Returns which tokens pass a bound: those above a value, and those of just that value before an id."""
    orders = order_of(values)
    return (orders > order) | ((orders == order) & (token_ids < end))


@triton.jit
def search(
    row, groups, count, size, temperature, low, high, target, best, unit,
    WEIGHTED: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the largest value of a row that tokens of a number, or of a weight, reach.

    Args:
        row: logits.
        groups: if LISTED, those that hold all tokens from `low` on, ascending.
        count: of the tokens that are looked at, past the vocabulary or not.
        size: of the vocabulary.
        temperature: of the values.
        low: order of a value that they reach; if they do not, nothing below it is looked at.
        high: order of the largest value.
        target: their number (int32) or weight (int64), above 0.
        best: the largest value.
        unit: of weights.
        WEIGHTED: whether it is a weight.
        LISTED: whether there are groups.
        BLOCK: tokens at a time.

    Returns:
        The value's order, and how much of the target is left to its ties, or more if they all pass.
    """
    rest = target
    while low < high:
        middle = (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        reach = tl.zeros([BLOCK], tl.int64 if WEIGHTED else tl.int32)
        least = tl.zeros([BLOCK], tl.int32) + high
        most = tl.zeros([BLOCK], tl.int32) + low - 1
        for first in range(0, count, BLOCK):
            token_ids, inside = visit_tokens(groups, first, count, LISTED, BLOCK)
            inside &= token_ids < size
            values = tl.div_rn(load_logits(row, token_ids, inside), temperature)
            order = order_of(values)
            is_above = (order >= middle) & inside
            if WEIGHTED:
                reach += tl.where(is_above, weigh(values, best, unit), 0)
            else:
                reach += is_above.to(tl.int32)
            least = tl.where(is_above, tl.minimum(least, order), least)
            most = tl.where(is_above | (order < low), most, tl.maximum(most, order))
        reached = tl.sum(reach, 0)
        if reached >= target:
            low = tl.min(least, 0)
            # Where these are just so many, they are those.
            high = tl.where(reached == target, low, high)
        else:
            high = tl.max(most, 0)
            rest = target - reached
    return low, rest


@triton.jit
def end_of_ties(
    row, groups, count, size, temperature, order, num_ties, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Returns the end of the first `num_ties` ids whose values are of one order."""
    end = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        token_ids, inside = visit_tokens(groups, first, count, LISTED, BLOCK)
        inside &= token_ids < size
        values = tl.div_rn(load_logits(row, token_ids, inside), temperature)
        is_tie = ((order_of(values) == order) & inside).to(tl.int32)
        passes = (is_tie != 0) & (tl.cumsum(is_tie, 0) <= num_ties)
        end = tl.where(passes, token_ids + 1, end)
        num_ties -= tl.sum(is_tie, 0)
    return tl.max(end, 0)


@triton.jit
def mass_of(
    row, groups, count, size, temperature, order, end, best, unit, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Returns the weight of the tokens that pass a bound."""
    mass = tl.zeros([BLOCK], tl.int64)
    for first in range(0, count, BLOCK):
        token_ids, inside = visit_tokens(groups, first, count, LISTED, BLOCK)
        inside &= token_ids < size
        values = tl.div_rn(load_logits(row, token_ids, inside), temperature)
        mass += tl.where(passes_bound(values, token_ids, order, end) & inside, weigh(values, best, unit), 0)
    return tl.sum(mass, 0)


@triton.jit
def load_best(candidates, row, num_candidates, CANDIDATES: tl.constexpr):
    """Returns the largest of a row of candidates and its place, the first on ties."""
    places = tl.arange(0, CANDIDATES)
    values = tl.load(candidates + row * num_candidates + places, places < num_candidates, float("-inf"))
    return tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
