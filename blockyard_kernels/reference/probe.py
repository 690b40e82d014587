"""Tests at start that results are batch-invariant on this machine.

Each op is tested by `blockyard_kernels.invariance` in the shapes that the model uses. If a product fails, the next
method of the ladder is taken.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

import torch

from blockyard_kernels.invariance import NUM_ROWS, attention_keeps_rows, keeps_rows, random_numbers
from blockyard_kernels.reference import elementwise
from blockyard_kernels.reference.attention import ROW_MULTIPLES, paged_attention
from blockyard_kernels.reference.linear import LADDER, Method, ReferenceLinear
from blockyard_kernels.shapes import Activation, AttentionShape, LinearSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from blockyard_kernels.ops import AttentionBatch

# Products of larger weights never run on one thread (`dry_runs.settle_threads`), and testing that would take long.
MAX_SINGLE_THREAD_WEIGHTS = 1 << 22
# Outputs of the tested shards, multiples of 16. Other sizes are not promised: Intel's AVX2 kernels change their bits.
SHARDS = (128, 64, 48, 32, 16)
EPSILON = 1e-6


def settle_linears(linears: Iterable[ReferenceLinear]) -> bool:
    """Moves the linears of each shape down the ladder until they are batch-invariant; returns whether all are."""
    alike: defaultdict[tuple[object, ...], list[ReferenceLinear]] = defaultdict(list)
    for linear in linears:
        key = linear.out_features, linear.is_gated, linear.in_features, linear.leaves, linear.dtype, linear.method
        alike[key].append(linear)
    settled = [_settle(group) for group in alike.values()]
    return all(settled)


def _settle(group: list[ReferenceLinear]) -> bool:
    first = group[0]
    fastest = first.method
    for method in LADDER[LADDER.index(fastest) :]:
        if first.method is not method:
            first.pack(method)
        if rows_are_independent(first) and columns_are_independent(first, method):
            for other in group[1:]:
                if other.method is not method:
                    other.pack(method)
            return True
    first.pack(fastest)
    return False


def rows_are_independent(linear: ReferenceLinear) -> bool:
    """Returns whether a product's rows have the same bits for every row count, and on one thread if it may use one.

    It compares sums before rounding: of 65,536 sums that differ in float32, only one or two differ in bfloat16.
    """
    rows = random_numbers(NUM_ROWS, linear.in_features, seed=7).to(linear.dtype)
    return keeps_rows(
        linear.unrounded,
        rows,
        torch.set_num_threads,
        max_rows=linear.max_rows,
        tries_one_thread=linear.num_weights <= MAX_SINGLE_THREAD_WEIGHTS,
    )


def columns_are_independent(like: ReferenceLinear, method: Method) -> bool:
    """Returns whether an output has the same bits in a shard of a weight like `like` as in the whole weight."""
    in_features, dtype = like.in_features, like.dtype
    weight = (random_numbers(sum(SHARDS), in_features, seed=9) * in_features**-0.5).to(dtype)
    rows = random_numbers(NUM_ROWS, in_features, seed=7).to(dtype)

    def compute(part: Tensor) -> Tensor:
        return ReferenceLinear(part, None, method, LinearSpec(leaves=like.leaves)).unrounded(rows)

    return torch.equal(torch.cat([compute(shard) for shard in weight.split(SHARDS)], dim=1), compute(weight))


def elementwise_is_independent(linears: Iterable[ReferenceLinear]) -> bool:
    """Returns whether norms and activations give a row the same bits for every row count, at the linears' widths."""
    linears = list(linears)
    normed = {(linear.in_features, linear.dtype) for linear in linears}
    activated = {
        (linear.num_rows, linear.is_gated, linear.activation, linear.dtype)
        for linear in linears
        if linear.activation is not None
    }
    weights = {(width, dtype): random_numbers(width, seed=6).to(dtype) for width, dtype in normed}
    return all(
        _keeps(lambda rows, weight=weight: elementwise.normalise(rows, weight, EPSILON), width, dtype)
        for (width, dtype), weight in weights.items()
    ) and all(_keeps(_activation(gated, name), width, dtype) for width, gated, name, dtype in activated)


def _activation(is_gated: bool, activation: Activation) -> Callable[[Tensor], Tensor]:
    return partial(elementwise.activate_and_mul if is_gated else elementwise.activate, activation=activation)


def _keeps(compute: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> bool:
    return keeps_rows(compute, random_numbers(NUM_ROWS, width, seed=5).to(dtype), torch.set_num_threads)


def find_row_multiple(shape: AttentionShape) -> int | None:
    """Returns the multiple to which attention must pad the rows of its tiles, or None if no multiple works."""
    return next((multiple for multiple in ROW_MULTIPLES if tiles_are_independent(shape, multiple)), None)


def tiles_are_independent(shape: AttentionShape, row_multiple: int) -> bool:
    """Returns whether attention with tiles padded to `row_multiple` gives a row the same bits in every step.

    It tests float32, in which attention computes all products for every dtype of the model.
    """

    def attend(rows: Tensor, batch: AttentionBatch, pool: Tensor) -> Tensor:
        return paged_attention(rows, batch, pool, 0, shape, None, row_multiple)

    return attention_keeps_rows(attend, shape, torch.float32, torch.set_num_threads)
