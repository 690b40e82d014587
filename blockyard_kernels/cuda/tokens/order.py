"""Bounds in the order of a row's tokens, in Triton: tests of a bound, the mass above it, and the search for a bound.

Tokens are ordered by value (logit / temperature), the largest first; on ties the lower id comes first. A bound
describes a prefix of this order: all tokens above a value, which is stored as an integer (`order_of`), and the tokens
of exactly that value whose ids are below an end. Bounds are found by bisection, whose every pass moves to a value in
the row. Masses are sums of integers, so that the order of summation does not matter. Knows no filters; each function
handles one row.
"""
# Triton functions are not plain Python: pyright understands only their syntax, and calls take other arguments than the
# parameters.
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

# `order_of` the value of an impossible token, -inf.
IMPOSSIBLE = tl.constexpr(-0x7F800001)
# The tokens of a group. The largest logit of each group is known, so that groups which cannot pass are skipped.
GROUP = tl.constexpr(64)
# Sums of weights stay below 2 ** MASS_BITS.
MASS_BITS = 62


def unit_of_weight(vocab_size: int) -> float:
    """Returns the integer weight of a row's best token: the largest at which no sum over the vocabulary overflows."""
    return 2.0 ** (MASS_BITS - vocab_size.bit_length())


@triton.jit
def order_of(values):
    """Maps float32 values to int32 numbers with the same order; 0 and -0 are equal."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(row, token_ids, inside):
    """Loads logits; NaN, and tokens that are not `inside`, become -inf."""
    logits = tl.load(row + token_ids, inside, float("-inf"))
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def visit_tokens(groups, first, count, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """Returns BLOCK token ids from place `first` on, of all tokens or of the listed groups, and whether each exists."""
    places = first + tl.arange(0, BLOCK)
    inside = places < count
    if LISTED:
        return tl.load(groups + places // GROUP, inside, 0) * GROUP + places % GROUP, inside
    return places, inside


@triton.jit
def weigh(values, best, unit):
    """Returns the weights `exp(value - best) * unit`: int64, rounded down."""
    return (tl.exp(values - best) * unit).to(tl.int64)


@triton.jit
def passes_bound(values, token_ids, order, end):
    """Returns which tokens pass a bound: those above its value, and those of exactly its value with ids below `end`."""
    orders = order_of(values)
    return (orders > order) | ((orders == order) & (token_ids < end))


@triton.jit
def search(
    row, groups, count, size, temperature, low, high, target, best, unit,
    WEIGHTED: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the largest value of a row such that the tokens of at least this value reach a target number or weight.

    Args:
        row: logits.
        groups: if LISTED, the ascending groups that hold all tokens of at least the value of `low`.
        count: the number of tokens to read, possibly beyond the vocabulary.
        size: the size of the vocabulary.
        temperature: the divisor of logits.
        low: the order of a value at which the target is reached; no value below it is tried.
        high: the order of the largest value.
        target: the number (int32) or weight (int64) to reach, above 0.
        best: the largest value.
        unit: the weight of the largest value.
        WEIGHTED: whether the target is a weight.
        LISTED: whether only the listed groups are read.
        BLOCK: tokens that are read at a time.

    Returns:
        The order of the value, and the part of the target that tokens of exactly this value must reach, or more if all
        of these tokens pass.
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
            # If these tokens reach the target exactly, the search is over.
            high = tl.where(reached == target, low, high)
        else:
            high = tl.max(most, 0)
            rest = target - reached
    return low, rest


@triton.jit
def end_of_ties(
    row, groups, count, size, temperature, order, num_ties, LISTED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Returns the end (id + 1) of the first `num_ties` ids whose value has the order `order`."""
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
    """Returns the largest of a row of candidates and its place; on ties the first place."""
    places = tl.arange(0, CANDIDATES)
    values = tl.load(candidates + row * num_candidates + places, places < num_candidates, float("-inf"))
    return tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
