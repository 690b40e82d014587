"""The launch parameters of kernels: tiles, warps and stages, as plain data.

A parameter that changes the order of a sum depends on the weight alone, never on the step; the others may go by the
number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GemmLaunch:
    """A tile of a product's results, and what computes it."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


WARP_GROUP_ROWS = 64
"""Tiles of so many rows and more are multiplied by groups of four warps (wgmma), those of fewer by single warps."""


@dataclass(frozen=True, slots=True)
class RowLaunch:
    """A tile of a row, or of some of its heads, and what computes it."""

    block: int
    num_warps: int
    heads: int | None = None
    """Heads of a tile, where the block is of half of what is rotated of a head."""
    rest: int = 0
    """A tile of what is not."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the launch. Products and sums are rounded apart, as the interpreter and the reference do."""
        tile = {"BLOCK": self.block}
        if self.heads is not None:
            tile |= {"HEADS": self.heads, "REST": self.rest}
        return {**tile, "num_warps": self.num_warps, "enable_fp_fusion": False}


@dataclass(frozen=True, slots=True)
class LoraLaunch:
    """A tile of the products of adapters, steps along the inner dimension, and what computes it."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of the launch. A product that is scaled and one that is added are rounded apart."""
        stages = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {"BLOCK_N": self.block_n, "BLOCK_K": self.block_k, **stages, "enable_fp_fusion": False}


# Few rows: the weight streams once, so that many narrow tiles ask for it at the same time.
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
"""By the bytes of a value, and whether there is one accumulator and nothing to convert: launches by the most rows that
they are for, fewest first. Sums of leaves that wait for their neighbours take up to three accumulators more."""

GEMM_BLOCK_K = {1: (128,), 2: (64, 32), 4: (32,)}
"""By the bytes of a value: steps along the inner dimension, the best first."""

LORA_SHRINK = {2: (LoraLaunch(16, 256, 4, 4), LoraLaunch(16, 64, 4, 6)), 4: (LoraLaunch(16, 64, 4, 3),)}
"""By the bytes of a value: adapters' first factors, the best launch first. One program streams a tile's columns over
all of the inner dimension, so that each step is long."""
LORA_EXPAND = {2: LoraLaunch(128, 32, 4, 2), 4: LoraLaunch(64, 32, 4, 2)}
"""By the bytes of a value: adapters' second factors."""

ACTIVATION = RowLaunch(1024, 4)
EMBEDDING = RowLaunch(1024, 4)
LAST_TOKENS = RowLaunch(256, 4)
NORM_WARPS = ((1024, 4), (4096, 8), (None, 16))
"""Of what looks at a whole row: by the most values of one, fewest first."""
ROTARY_VALUES = 1024
"""The launch of a tile of half heads."""
SAMPLING = RowLaunch(2048, 4)
"""The launch of a chunk of a row's tokens."""
FILTERS = RowLaunch(4096, 16)
"""Of tokens that one program looks at, of a row that it has to itself."""


def first_row_counts() -> list[int]:
    """Returns the fewest rows of each class that products are launched by."""
    return sorted({1, *(most + 1 for launches in GEMM.values() for most, _ in launches if most is not None)})


def gemm_launch(itemsize: int, is_plain: bool, num_rows: int) -> GemmLaunch:
    """Returns how a product of so many rows is launched."""
    return next(launch for most, launch in GEMM[itemsize, is_plain] if most is None or num_rows <= most)


def gemm_block_k(itemsize: int, leaf_features: int) -> int:
    """Returns the step along a leaf: the first of the list that divides it, or else the last."""
    steps = GEMM_BLOCK_K[itemsize]
    return next((step for step in steps if leaf_features % step == 0), steps[-1])


def shrink_launch(itemsize: int, leaf_features: int) -> LoraLaunch:
    """Returns how first factors are multiplied: the first of the list whose step divides a leaf, or else the last."""
    launches = LORA_SHRINK[itemsize]
    return next((launch for launch in launches if leaf_features % launch.block_k == 0), launches[-1])


def norm_launch(width: int) -> RowLaunch:
    """Returns how rows are normed or quantized: each by one program, in one tile."""
    num_warps = next(warps for most, warps in NORM_WARPS if most is None or width <= most)
    return RowLaunch(_power_of_two(width), num_warps)


def rotary_launch(head_dim: int, rotated: int) -> RowLaunch:
    """Returns how heads are rotated, or the first numbers of each: several by one program."""
    block, rest = _power_of_two(rotated // 2), _power_of_two(head_dim - rotated) if rotated < head_dim else 0
    return RowLaunch(block, 4, max(1, ROTARY_VALUES // max(block, rest)), rest)


def _power_of_two(size: int) -> int:
    """Returns the first one that is not below."""
    return 1 << (size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """How many keys a program of attention multiplies at a time, and what computes it."""

    key_tile: int
    num_warps: int
    num_stages: int


KEY_TILE = 64
"""What ranges of keys begin at a multiple of: a multiple of what is multiplied at a time."""
MIN_SPLIT = 128
"""Keys of the shortest range that is worth a partial result."""
PARTIAL_BYTES = 128 << 20
"""The most partial results of decodes, and of prefills, in bytes of float32."""
TILE_ROWS = {False: (16, 64), True: (64, 64)}
"""By whether attention is invariant: rows of a decode's and of a prefill's tile. Tiles of 16 and of 64 rows multiply by
different instructions, which may add in different orders; a row is the same in both only where the tile is the same."""
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
    # There are no matrix instructions that are exact: products are written out, and small tiles compile in seconds.
    4: {
        (16, 256): AttentionLaunch(32, 4, 2),
        (64, 256): AttentionLaunch(32, 8, 2),
    },
}
"""By the bytes of a value, then by the most rows of a tile and dimensions of a head. Keys that are multiplied at a time
change the order of a sum: in invariant mode all tiles have the same."""


def attention_launch(itemsize: int, tile_rows: int, head_dim: int) -> AttentionLaunch:
    """Returns how attention over such tiles is launched: as the next larger one of the table, or as the largest."""
    launches = ATTENTION[itemsize]
    rows = min((most for most, _ in launches if most >= tile_rows), default=max(most for most, _ in launches))
    dims = min((most for _, most in launches if most >= head_dim), default=max(most for _, most in launches))
    return launches[rows, dims]
