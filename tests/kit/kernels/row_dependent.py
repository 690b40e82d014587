"""Products whose sums are made in another order for some rows, as libraries make them on one processor or another.

They show on any processor that the probe notices, and that a test of exactness does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from blockyard_kernels.reference.linear import Method, ReferenceLinear

if TYPE_CHECKING:
    from torch import Tensor

TILE_ROWS = 16


def in_order(rows: Tensor, weight: Tensor) -> Tensor:
    """Sums row by row, each from products of its own: no library chooses anything by the number of rows."""
    wide = weight.float()
    results = rows.new_empty(len(rows), len(weight), dtype=torch.float32)
    for row, result in zip(rows.float(), results, strict=True):
        torch.sum(row * wide, -1, out=result)
    return results.to(rows.dtype)


def by_pairs(rows: Tensor, weight: Tensor) -> Tensor:
    """Sums products at even places apart from those at odd ones, as the tiles of AMX do."""
    even, odd = (in_order(rows[:, place::2].float(), weight[:, place::2]) for place in (0, 1))
    return (even + odd).to(rows.dtype)


class TiledLinear(ReferenceLinear):
    """Computes whole tiles of rows by pairs and the rest in order, where its method is one of `tiled`.

    A product by `Method.TILED` has whole tiles only, so it is exact.
    """

    tiled = frozenset({Method.PREPACKED, Method.PADDED})

    def pack(self, method: Method, weight: Tensor | None = None) -> None:
        """Keeps the weight as it is given."""
        if weight is not None:
            self._plain = weight
        super().pack(method, weight)

    def _products(self, hidden: Tensor) -> Tensor:
        rows = hidden.to(self.dtype)
        num_tiled = len(rows) // TILE_ROWS * TILE_ROWS if self.method in self.tiled else 0
        return torch.cat([by_pairs(rows[:num_tiled], self._plain), in_order(rows[num_tiled:], self._plain)])


class CountedLinear(ReferenceLinear):
    """Sums an odd number of rows in two halves: what passes with it proves nothing."""

    def _products(self, hidden: Tensor) -> Tensor:
        weight = self._dense()
        if len(hidden) % 2 == 0:
            return functional.linear(hidden, weight, self._bias)
        halves = [functional.linear(hidden[:, place::2], weight[:, place::2]) for place in (0, 1)]
        return halves[0] + halves[1] if self._bias is None else halves[0] + halves[1] + self._bias
