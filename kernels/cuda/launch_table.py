"""How kernels are launched: tiles, warps and stages, as plain data.

A parameter that changes the order of a sum depends on the weight alone, never on the step; the others may go by the
number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """A tile of a product's results, and what computes it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


GEMM = {
    # Few rows: the weight streams once, so that many narrow tiles ask for it at the same time. The sums of leaves
    # that wait for their neighbours take three more accumulators: the tiles of many rows are as large as that allows.
    2: (
        (16, GemmLaunch(16, 32, 4, 5, 2)),
        (32, GemmLaunch(32, 32, 4, 4, 2)),
        (64, GemmLaunch(64, 64, 4, 4, 1)),
        (None, GemmLaunch(128, 64, 8, 3, 1)),
    ),
    4: (
        (16, GemmLaunch(16, 32, 4, 3, 2)),
        (None, GemmLaunch(64, 64, 8, 2, 1)),
    ),
}
"""By the bytes of a value: launches by the most rows that they are for, fewest first."""

GEMM_BLOCK_K = {2: (128, 64, 32), 4: (32,)}
"""By the bytes of a value: steps along the inner dimension, the best first."""


def gemm_launch(itemsize: int, num_rows: int) -> GemmLaunch:
    """Returns how a product of so many rows is launched."""
    return next(launch for most, launch in GEMM[itemsize] if most is None or num_rows <= most)


def uniform_gemm_launch(itemsize: int) -> GemmLaunch:
    """Returns how any product may be launched, so that all rows are multiplied by the same instructions."""
    return GEMM[itemsize][-1][1]


def gemm_block_k(itemsize: int, leaf_features: int) -> int:
    """Returns the step along a leaf: the first of the list that divides it, or else the last."""
    steps = GEMM_BLOCK_K[itemsize]
    return next((step for step in steps if leaf_features % step == 0), steps[-1])
