"""The reference backend with its products quantized, by the definitions of `blockyard_kernels.reference`."""

from __future__ import annotations

from itertools import chain, cycle
from typing import TYPE_CHECKING, cast

import torch

from blockyard_kernels.packed import QuantizedWeight
from blockyard_kernels.reference.backend import ReferenceBackend
from blockyard_kernels.reference.linear import join_rows
from blockyard_kernels.shapes import PLAIN_LINEAR, LinearSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from blockyard_kernels.arena import Arena
    from blockyard_kernels.lora import LoraRows
    from blockyard_kernels.ops import PackedLinear
    from blockyard_kernels.packed import WeightRows

    # (rows [R, K], weight [N, K], bias [N], leaves) -> [R, N] float32.
    Multiply = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]


class _QuantizedLinear:
    is_table = is_partial = False

    def __init__(self, multiply: Multiply, weight: Tensor, bias: Tensor | None, *, gated: bool, leaves: int) -> None:
        self.multiply = multiply
        self.is_gated, self.dtype, self.leaves = gated, weight.dtype, leaves
        self.weight, self.bias = weight.clone(), bias


class QuantizedReference(ReferenceBackend):
    """Multiplies as it is told, on a processor."""

    def __init__(self, first: Multiply, *others: Multiply) -> None:
        """`first` is for the weight that is packed first, a network's head; the others follow, again and again."""
        super().__init__(torch.device("cpu"))
        self._multiply = chain([first], cycle(others or [first]))

    def pack_linear(
        self,
        weight: WeightRows,
        bias: Tensor | None = None,
        spec: LinearSpec = PLAIN_LINEAR,
        arena: Arena | None = None,
    ) -> PackedLinear:
        """Keeps a weight."""
        assert not isinstance(weight, QuantizedWeight)
        kept = _QuantizedLinear(next(self._multiply), join_rows(weight), bias, gated=spec.gated, leaves=spec.leaves)
        return cast("PackedLinear", kept)

    def linear(
        self, hidden: Tensor, packed: PackedLinear, *, wide: bool = False, lora: LoraRows | None = None
    ) -> Tensor:
        """Multiplies rows."""
        assert isinstance(packed, _QuantizedLinear)
        result = packed.multiply(hidden, packed.weight, packed.bias, packed.leaves)
        if packed.is_gated:
            result = self.silu_and_mul(result)
        return result if wide else result.to(hidden.dtype)
