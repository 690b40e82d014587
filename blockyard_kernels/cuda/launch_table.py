"""The launch parameters of kernels: tiles, warps and stages, as plain data.

A parameter that changes the order of a sum depends only on the weight, never on the step. Other parameters may depend
on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """A tile of a product's results, and the warps, stages and programs that compute it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


WARP_GROUP_ROWS = 64
"""Tiles with at least this many rows are multiplied by groups of four warps (wgmma), smaller tiles by single warps."""


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """A tile of a row, or of some of its heads, and the warps that compute it."""

    block: int
    num_warps: int
    heads: int | None = None
    """The heads of a rotary tile, whose `block` covers half of the rotated numbers of a head."""
    rest: int = 0
    """The size that covers the numbers of a head that are not rotated."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the launch. Products and sums are rounded separately, as in the reference."""
        tile = {"BLOCK": self.block}
        if self.heads is not None:
            tile |= {"HEADS": self.heads, "REST": self.rest}
        return {**tile, "num_warps": self.num_warps, "enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class LoraLaunch:
    """A tile of the products of adapters, the step along the inner dimension, and the warps that compute it."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the launch. A product and the sum to which it is added are rounded separately."""
        stages = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {"BLOCK_N": self.block_n, "BLOCK_K": self.block_k, **stages, "enable_fp_fusion": False}


# Few rows: reading the weight takes most of the time, so many narrow tiles read it at the same time.
_FEW = ((16, GemmLaunch(16, 32, 4, 8, 2)), (32, GemmLaunch(32, 32, 4, 8, 2)))
_PLAIN = (
    *_FEW,
    (64, GemmLaunch(64, 64, 4, 5, 2)),
    (256, GemmLaunch(128, 64, 4, 4, 2)),
    (None, GemmLaunch(128, 256, 8, 3, 1)),
)
_LEAVES = (
    *_FEW,
    (64, GemmLaunch(64, 64, 8, 5, 1)),
    (None, GemmLaunch(128, 64, 8, 4, 1)),
)
GEMM = {
    (1, True): _PLAIN,
    (1, False): _LEAVES,
    (2, True): _PLAIN,
    (2, False): _LEAVES,
    (4, True): ((16, GemmLaunch(16, 32, 4, 3, 2)), (None, GemmLaunch(64, 64, 8, 2, 1))),
    (4, False): ((16, GemmLaunch(16, 32, 4, 3, 2)), (None, GemmLaunch(64, 64, 8, 2, 1))),
}
"""Keys: the bytes of a value, and whether a product has one leaf and needs no conversion of the weight. Values: pairs
of the most rows and their launch, fewest rows first. Several leaves take up to three more accumulators."""

GEMM_BLOCK_K = {1: (128,), 2: (64, 32), 4: (32,)}
"""Steps along the inner dimension by the bytes of a value, the best first."""

LORA_SHRINK = {2: (LoraLaunch(16, 256, 4, 4), LoraLaunch(16, 64, 4, 6)), 4: (LoraLaunch(16, 64, 4, 3),)}
"""Launches for adapters' `shrink` factors by the bytes of a value, the best first. One program reads a tile's columns
over the whole inner dimension, so that each step is long."""
LORA_EXPAND = {2: LoraLaunch(128, 32, 4, 2), 4: LoraLaunch(64, 32, 4, 2)}
"""Launches for adapters' `expand` factors by the bytes of a value."""

ACTIVATION = RowLaunch(1024, 4)
EMBEDDING = RowLaunch(1024, 4)
LAST_TOKENS = RowLaunch(256, 4)
MASKS = RowLaunch(1024, 4)
NORM_WARPS = ((1024, 4), (4096, 8), (None, 16))
"""Warps of kernels that read a whole row: pairs of the most values of a row and the warps, fewest values first."""
ROTARY_VALUES = 1024
"""The values of a rotary tile, which covers half of the rotated numbers of several heads."""
SAMPLING = RowLaunch(2048, 4)
"""The launch of a chunk of a row's tokens."""
FILTERS = RowLaunch(4096, 16)
"""The launch of one program for a whole row, which reads one block of tokens at a time."""


def first_row_counts() -> list[int]:
    """Returns the fewest rows of each class of product launches."""
    return sorted({1, *(most + 1 for launches in GEMM.values() for most, _ in launches if most is not None)})


def gemm_launch(itemsize: int, is_plain: bool, num_rows: int) -> GemmLaunch:
    """Returns the launch of a product of `num_rows` rows."""
    return next(launch for most, launch in GEMM[itemsize, is_plain] if most is None or num_rows <= most)


def gemm_block_k(itemsize: int, leaf_features: int) -> int:
    """Returns the step along a leaf: the first step of the list that divides the leaf, or else the last."""
    steps = GEMM_BLOCK_K[itemsize]
    return next((step for step in steps if leaf_features % step == 0), steps[-1])


def shrink_launch(itemsize: int, leaf_features: int) -> LoraLaunch:
    """Returns the launch of `shrink` factors: the first of the list whose step divides the leaf, or else the last."""
    launches = LORA_SHRINK[itemsize]
    return next((launch for launch in launches if leaf_features % launch.block_k == 0), launches[-1])


def norm_launch(width: int) -> RowLaunch:
    """Returns the launch of norms and of quantization: one program computes a row, in one tile."""
    num_warps = next(warps for most, warps in NORM_WARPS if most is None or width <= most)
    return RowLaunch(_power_of_two(width), num_warps)


def rotary_launch(head_dim: int, rotated: int) -> RowLaunch:
    """Returns the launch of the rotation of heads, or of their first `rotated` numbers: a program has several heads."""
    block, rest = _power_of_two(rotated // 2), _power_of_two(head_dim - rotated) if rotated < head_dim else 0
    return RowLaunch(block, 4, max(1, ROTARY_VALUES // max(block, rest)), rest)


def _power_of_two(size: int) -> int:
    """Returns the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """The keys that a program of attention multiplies at a time, and its warps and stages."""

    key_tile: int
    num_warps: int
    num_stages: int


KEY_TILE = 64
"""Ranges of keys begin at a multiple of this, which is a multiple of every `AttentionLaunch.key_tile`."""
MIN_SPLIT = 128
"""The fewest keys for which a range gets its own work item and partial result."""
PARTIAL_BYTES = 128 << 20
"""The most bytes of float32 partial results, for decodes and for prefills separately."""
TILE_ROWS = {False: (16, 64), True: (64, 64)}
"""Rows of a decode's and of a prefill's tile, by whether attention is invariant. Tiles of 16 and of 64 rows use
different instructions, which may add in different orders, so invariant attention has the same tile for both."""
PROGRAMS = (2, 1)
"""Programs of decodes and of prefills for each multiprocessor."""
ATTENTION = {
    2: {
        (16, 64): AttentionLaunch(64, 4, 3),
        (16, 128): AttentionLaunch(64, 4, 3),
        (16, 256): AttentionLaunch(64, 4, 2),
        (64, 64): AttentionLaunch(64, 4, 3),
        (64, 128): AttentionLaunch(64, 4, 3),
        (64, 256): AttentionLaunch(64, 8, 2),
    },
    # No matrix instruction is exact in float32, so Triton unrolls the products; small tiles keep compile times short.
    4: {
        (16, 256): AttentionLaunch(32, 4, 2),
        (64, 256): AttentionLaunch(32, 8, 2),
    },
}
"""Launches by the bytes of a value, then by the most rows of a tile and the most dimensions of a head. The key tile
changes the order of a sum; in invariant mode all tiles have the same one."""


def attention_launch(itemsize: int, tile_rows: int, head_dim: int) -> AttentionLaunch:
    """Returns the launch of attention for the next larger tile in the table, or for the largest tile."""
    launches = ATTENTION[itemsize]
    rows = min((most for most, _ in launches if most >= tile_rows), default=max(most for most, _ in launches))
    dims = min((most for _, most in launches if most >= head_dim), default=max(most for _, most in launches))
    return launches[rows, dims]
