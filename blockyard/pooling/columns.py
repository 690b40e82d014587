"""Splits and joins the columns of pooled numbers, as every message has them: sizes, and one string of float32."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FLOAT_BYTES = 4


def split_values(sizes: Iterable[int], values: bytes) -> list[bytes]:
    """Splits numbers, little endian, into those of each sequence, of which there are `sizes`."""
    ends = list(itertools.accumulate((FLOAT_BYTES * size for size in sizes), initial=0))
    return [values[start:end] for start, end in itertools.pairwise(ends)]


def join_values(each: Sequence[bytes]) -> tuple[list[int], bytes]:
    """Joins the numbers of several sequences: returns how many each has, and all of them."""
    return [len(values) // FLOAT_BYTES for values in each], b"".join(each)
