"""How many leaves a product has: the slices of its inner dimension that are summed apart (`kernels.leaves`)."""

from __future__ import annotations

import math

MAX_LEAVES = 8
# Leaves are at least so long, where the inner dimension is twice as long: shorter ones cost time.
MIN_LEAF_FEATURES = 256
# Whole words of every type, and whole runs of what backends interleave.
LEAF_MULTIPLE = 8


def count_leaves(in_features: int, unit_features: int = 1) -> int:
    """Returns how many leaves a weight has.

    Args:
        in_features: the inner dimension.
        unit_features: what a cut must not split, as a head.
    """
    unit = math.lcm(unit_features, LEAF_MULTIPLE)
    leaves = MAX_LEAVES
    while leaves > 1 and (
        in_features % (leaves * unit) or 2 * MIN_LEAF_FEATURES <= in_features < leaves * MIN_LEAF_FEATURES
    ):
        leaves //= 2
    return leaves
