"""Fixed-tree summation of matrix products, so that results do not depend on the number of devices.

The inner dimension of a product is cut into a power of two of equal slices, the leaves, even on one device. The product
over each leaf is summed separately in float32. The sums of the leaves are then added as a binary tree: neighbours
first, then the sums of neighbours. With tensor parallelism each device holds some neighbouring leaves and computes the
sum of their subtree; the devices then add these sums in pairs along the rest of the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


def add_leaves(sums: Sequence[Tensor]) -> Tensor:
    """Adds the float32 sums of the leaves as a binary tree. `sums` is in leaf order; its length is a power of two."""
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]
