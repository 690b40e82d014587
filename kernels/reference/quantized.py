"""Weights that a checkpoint has quantized, kept in the checkpoint's format. `int4` defines their products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.reference.int4 import linear_quantized
from kernels.shapes import PLAIN_LINEAR, LinearSpec

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.packed import QuantizedWeight
    from kernels.reference.linear import Method


class ReferenceQuantized:
    """Same interface as `ReferenceLinear`. Only its adapters use `method`, since its own products are exact."""

    is_table = False

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, method: Method, spec: LinearSpec = PLAIN_LINEAR
    ) -> None:
        self.num_rows, self.in_features = weight.levels.shape
        self.leaves, self.method = spec.leaves, method
        self.is_gated, self.is_partial = spec.gated, spec.partial
        self.out_features = self.num_rows // 2 if spec.gated else self.num_rows
        self.activation, self.logits = spec.activation, spec.logits
        self.dtype, self.device = weight.dtype, weight.levels.device
        self.layout = "8 bits" if weight.zeros is None else f"4 bits in groups of {weight.group}"
        self._weight, self._bias = weight, bias

    @property
    def num_bytes(self) -> int:
        weight = self._weight
        held = (weight.levels, weight.scales, weight.zeros, weight.order, self._bias)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight [rows, in_features] float32 and a copy of the bias [rows]."""
        return self._weight.dequantize(), None if self._bias is None else self._bias.clone()

    def unrounded(self, hidden: Tensor) -> Tensor:
        """Multiplies -> float32; the products of a partial weight do not include the bias."""
        sums = linear_quantized(hidden, self._weight, self.leaves)
        return sums if self.is_partial else self.biased(sums)

    def biased(self, sums: Tensor) -> Tensor:
        """Adds the bias to the sums [R, out_features] of all ranks."""
        return sums if self._bias is None else sums + self._bias.float()
