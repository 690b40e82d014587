"""Sums that do not depend on how many devices share a product: over fixed slices of it, added as a binary tree.

The inner dimension of a product that devices may share is cut in a power of two of equal slices, its leaves, on one
device too. Each is summed by itself in float32; then neighbours are added, and sums of neighbours: a device that holds
some neighbouring leaves comes to a subtree's sum, and devices in pairs to the rest of the tree.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

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


def add_leaves(sums: Sequence[Tensor]) -> Tensor:
    """Adds float32 sums of leaves, a power of two of them in order, as the tree does."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
