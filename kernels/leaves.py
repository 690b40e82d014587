"""Sums that do not depend on how many devices share a product: over fixed slices of it, added as a binary tree.

The inner dimension of a product that devices may share is cut in a power of two of equal slices, its leaves, on one
device too. Each is summed by itself in float32; then neighbours are added, and sums of neighbours: a device that holds
some neighbouring leaves comes to a subtree's sum, and devices in pairs to the rest of the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def add_leaves(sums: Sequence[Tensor]) -> Tensor:
    """Adds float32 sums of leaves, a power of two of them in order, as the tree does."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
