"""Weights in int8, quantized as they are packed: symmetric for each output and leaf, as csrc/int8.h says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.arena import keep
from kernels.cpu.packed import (
    ELEMENT_TYPES,
    WORD_BYTES,
    check_leaves,
    count_columns,
    panel_columns,
    panel_rows,
    row_addresses,
)
from kernels.shapes import AS_THEY_ARE, Activation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kernels.arena import Arena
    from kernels.cpu.library import Executor
    from kernels.shapes import LogitTransform

# Sums of so many products of bytes, less what the shift adds, stay within 32 bits.
MAX_IN_FEATURES = 2**17


class Int8Linear:
    """A weight in panels of bytes, with the scale of each output in each leaf, and its bias.

    Its rows may come in parts, of which nothing is kept. It is no table: an embedding's rows are read as they were.
    """

    is_table = False
    layout = "panels of int8, a scale for each output and leaf"

    def __init__(
        self,
        executor: Executor,
        arena: Arena,
        weights: Sequence[Tensor],
        bias: Tensor | None,
        *,
        gated: bool,
        leaves: int,
        activation: Activation | None = None,
        logits: LogitTransform = AS_THEY_ARE,
        partial: bool = False,
    ) -> None:
        self.num_rows, self.in_features = sum(len(part) for part in weights), weights[0].shape[1]
        if self.in_features > MAX_IN_FEATURES:
            raise ValueError(f"in_features must be at most {MAX_IN_FEATURES} in int8, not {self.in_features}")
        check_leaves(self.in_features, leaves, WORD_BYTES)
        self.leaves = leaves
        self._width = executor.panel_columns
        self.is_partial = partial
        self.is_gated = gated
        self.activation = Activation.SILU if gated and activation is None else activation
        self.logits = logits
        self.out_features = self.num_rows // 2 if gated else self.num_rows
        self.bias = None if bias is None else keep(arena, bias)
        num_columns = count_columns(self.num_rows, self._width)
        self.weight = arena.take(num_columns * -(-self.in_features // WORD_BYTES) * WORD_BYTES)
        self.scales, self.sums = (
            arena.take(leaves * num_columns * WORD_BYTES).view(dtype).view(leaves, num_columns)
            for dtype in (torch.float32, torch.int32)
        )
        if weights[0].is_meta:
            # As in CpuLinear.
            return
        parts = [part if part.stride(1) == 1 else part.contiguous() for part in weights]
        columns = panel_columns(row_addresses(parts), self._width, gated=gated)
        addresses = (self.weight.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr())
        executor.pack_int8(columns, (self.in_features, ELEMENT_TYPES[weights[0].dtype], leaves), addresses)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return self.weight.nbytes + self.scales.nbytes + self.sums.nbytes + bias_bytes

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns the weight [num_rows, in_features] float32, as it was rounded, and a copy of the bias [num_rows]."""
        weight = panel_rows(
            self.weight.view(torch.int8), self.in_features, self._width, self.num_rows, gated=self.is_gated
        )
        scales = torch.stack(
            [panel_rows(leaf, 1, self._width, self.num_rows, gated=self.is_gated)[:, 0] for leaf in self.scales], dim=1
        )
        wide = weight.view(self.num_rows, self.leaves, -1) * scales[:, :, None]
        return wide.view(self.num_rows, self.in_features), None if self.bias is None else self.bias.clone()
