"""The reference backend with its products quantized, by the definitions of `kernels.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.reference.backend import ReferenceBackend
from kernels.reference.linear import join_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kernels.ops import PackedLinear

    # (rows [R, K], weight [N, K], bias [N], leaves) -> [R, N] float32.
    Multiply = Callable[[Tensor, Tensor, Tensor | None, int], Tensor]


class _QuantizedLinear:
    is_table = is_partial = False

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool, leaves: int) -> None:
        self.is_gated, self.dtype, self.leaves = gated, weight.dtype, leaves
        self.weight, self.bias = weight.clone(), bias


class QuantizedReference(ReferenceBackend):
    """Multiplies as it is told, on a processor."""

    def __init__(self, multiply: Multiply) -> None:
        super().__init__(torch.device("cpu"))
        self._multiply = multiply

    def pack_linear(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        leaves: int = 1,
        partial: bool = False,
    ) -> PackedLinear:
        """Keeps a weight."""
        return _QuantizedLinear(join_rows(weight), bias, gated=gated, leaves=leaves)  # type: ignore[return-value]

    def linear(self, hidden: Tensor, packed: PackedLinear, *, wide: bool = False) -> Tensor:
        """Multiplies rows."""
        assert isinstance(packed, _QuantizedLinear)
        result = self._multiply(hidden, packed.weight, packed.bias, packed.leaves)
        if packed.is_gated:
            result = self.silu_and_mul(result)
        return result if wide else result.to(hidden.dtype)
