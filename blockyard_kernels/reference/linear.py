"""Linear layers that give a row the same bits for any number of rows. Like `attention`, this module calls products.

Libraries use other kernels for few rows or for the last rows, so that a row's bits change with the number of rows.
Three methods avoid that on a CPU and are tried in this order (`Method`); `blockyard_kernels.reference.probe` tests
which one works on this machine. Knows nothing of networks.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from blockyard_kernels.invariance import MAX_ROWS
from blockyard_kernels.shapes import PLAIN_LINEAR, LinearSpec, add_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence


PADDED_ROWS = 4
TILE_ROWS = 32
# Products are cut so that the probe can test every number of rows that the library gets: at most MAX_ROWS rows and
# MAX_RESULTS results, but at least MIN_CUT_ROWS rows.
MIN_CUT_ROWS = 96
MAX_RESULTS = 1 << 24


class Method(StrEnum):
    """How a product is computed."""

    PREPACKED = "prepacked"
    """oneDNN with a weight in its own layout and at least two rows: the fastest."""
    PADDED = "padded"
    """torch's product, with rows padded to a multiple of 4."""
    TILED = "tiled"
    """A loop of torch's products of 32 rows each, the last one padded."""
    PLAIN = "plain"
    """torch's product, as on a GPU: not batch-invariant."""


LADDER = (Method.PREPACKED, Method.PADDED, Method.TILED)


def can_prepack(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN packs weights of a dtype on this processor (half floats need its support)."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True


def join_rows(weight: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns a weight as one tensor; parts are concatenated into a copy."""
    return weight if isinstance(weight, Tensor) else torch.cat(list(weight))


class ReferenceLinear:
    """A weight [out_features, in_features] and an optional bias, packed for one method.

    16-bit weights that oneDNN cannot pack on this processor are stored and multiplied in float32. So are weights of
    several leaves or ranks, since their partial sums must not be rounded. Results are rounded once.
    """

    is_table = False

    def __init__(self, weight: Tensor, bias: Tensor | None, method: Method, spec: LinearSpec = PLAIN_LINEAR) -> None:
        self.num_rows, self.in_features = weight.shape
        # PLAIN does not promise batch invariance, so it needs no tree of leaves.
        self.leaves = 1 if method is Method.PLAIN else spec.leaves
        self.is_gated, self.is_partial = spec.gated, spec.partial
        self.out_features = self.num_rows // 2 if spec.gated else self.num_rows
        self.activation, self.logits = spec.activation, spec.logits
        self.dtype = weight.dtype
        self.device = weight.device
        self._bias = bias
        self.pack(method, weight)

    @property
    def num_bytes(self) -> int:
        bias_bytes = 0 if self._bias is None else self._bias.nbytes
        return self.num_rows * self.in_features * self._compute_dtype.itemsize + bias_bytes

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns copies of the weight [rows, in_features] and of the bias [rows]."""
        bias = None if self._bias is None else self._bias.to(self.dtype, copy=True)
        return self._dense().to(self.dtype, copy=True), bias

    @property
    def num_weights(self) -> int:
        return self.num_rows * self.in_features

    @property
    def max_rows(self) -> int:
        """The most rows that the library multiplies at a time."""
        return min(MAX_ROWS, max(MIN_CUT_ROWS, MAX_RESULTS // self.num_rows))

    def pack(self, method: Method, weight: Tensor | None = None) -> None:
        """Packs a new weight for a method, or packs the current weight again."""
        dense = self._dense() if weight is None else weight
        self.method = method
        keeps = method is Method.PLAIN or (self.leaves == 1 and not self.is_partial and can_prepack(self.dtype))
        self._compute_dtype = self.dtype if keeps else torch.float32
        self.layout = f"{method.value}, {str(self._compute_dtype).removeprefix('torch.')}"
        if self._bias is not None:
            self._bias = self._bias.to(self._compute_dtype)
        parts = dense.to(self._compute_dtype).split(self.in_features // self.leaves, dim=1)
        prepacked = method is Method.PREPACKED
        reorder = torch.ops.mkldnn._reorder_linear_weight if prepacked else torch.Tensor.contiguous
        self._weights = [reorder(part) for part in parts]

    def _dense(self) -> Tensor:
        dense = [part.to_dense() for part in self._weights] if self.method is Method.PREPACKED else self._weights
        return torch.cat(dense, dim=1) if self.leaves > 1 else dense[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Multiplies rows [R, in_features] by all rows of the weight: gates and ups stay separate columns."""
        return self.unrounded(hidden).to(self.dtype)

    def unrounded(self, hidden: Tensor) -> Tensor:
        """Multiplies, and returns the products in the dtype that they are computed in: float32 or the weight's own.

        The products of a partial weight do not include the bias.
        """
        num_rows = hidden.shape[0]
        if num_rows == 0:
            return hidden.new_empty(0, self.num_rows)
        rows = hidden.to(self._compute_dtype)
        if num_rows <= self.max_rows or self.method is Method.PLAIN:
            return self._products(rows)[:num_rows]
        return torch.cat([self._products(part)[: len(part)] for part in rows.split(self.max_rows)])

    def _products(self, hidden: Tensor) -> Tensor:
        bias = None if self.is_partial else self._bias
        if self.leaves == 1:
            return self._product(hidden, self._weights[0], bias)
        parts = hidden.split(self.in_features // self.leaves, dim=1)
        pairs = zip(parts, self._weights, strict=True)
        result = add_leaves([self._product(part.contiguous(), weight, None) for part, weight in pairs])
        return result if bias is None else result + bias

    def biased(self, sums: Tensor) -> Tensor:
        """Adds the bias to the sums [R, out_features] of all ranks."""
        return sums if self._bias is None else sums + self._bias

    def _product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        match self.method:
            case Method.PREPACKED:
                rows = torch.cat([hidden, hidden]) if hidden.shape[0] == 1 else hidden
                return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
            case Method.PADDED:
                return functional.linear(_pad_rows(hidden, PADDED_ROWS), weight, bias)
            case Method.TILED:
                tiles = _pad_rows(hidden, TILE_ROWS).split(TILE_ROWS)
                return torch.cat([functional.linear(tile, weight, bias) for tile in tiles])
            case Method.PLAIN:
                return functional.linear(hidden, weight, bias)


def _pad_rows(rows: Tensor, multiple: int) -> Tensor:
    missing = -rows.shape[0] % multiple
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])]) if missing else rows
