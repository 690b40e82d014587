"""Integer weights, quantized when they are packed or already by the checkpoint. See csrc/int8.h and csrc/int4.h."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard_kernels.arena import Arena, keep
from blockyard_kernels.cpu.packed import (
    ELEMENT_TYPES,
    WORD_BYTES,
    check_leaves,
    count_columns,
    panel_columns,
    panel_rows,
    row_addresses,
)
from blockyard_kernels.packed import GROUPS, QuantizedWeight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockyard_kernels.cpu.library import Executor
    from blockyard_kernels.shapes import LinearSpec

# Sums of this many products of bytes, without the part that SHIFT adds, fit into 32 bits.
MAX_IN_FEATURES = 2**17
# As in csrc/int8.h.
SHIFT = 128
# Bytes of a scale (float32) and of a zero point (bfloat16), as in csrc/int4.h.
SCALE_BYTES, ZERO_BYTES = 4, 2


class Int8Linear:
    """An int8 weight in panels, with a scale for each output and leaf, and its bias.

    Its rows may come in parts, which are copied, or already quantized: then all leaves of an output have its given
    scale. It is not a table, since an embedding needs unquantized rows.
    """

    is_table = False
    layout = "panels of int8, a scale for each output and leaf"

    def __init__(
        self,
        executor: Executor,
        arena: Arena,
        weights: Sequence[Tensor] | QuantizedWeight,
        bias: Tensor | None,
        spec: LinearSpec,
    ) -> None:
        given = weights if isinstance(weights, QuantizedWeight) else None
        parts = [weights.levels] if isinstance(weights, QuantizedWeight) else weights
        self.num_rows, self.in_features = sum(len(part) for part in parts), parts[0].shape[1]
        if self.in_features > MAX_IN_FEATURES:
            raise ValueError(f"in_features must be at most {MAX_IN_FEATURES} in int8, not {self.in_features}")
        leaves = self.leaves = spec.leaves
        check_leaves(self.in_features, leaves, WORD_BYTES)
        self._width = executor.panel_columns
        self.is_gated, self.is_partial = spec.gated, spec.partial
        self.activation, self.logits = spec.activation, spec.logits
        self.out_features = self.num_rows // 2 if spec.gated else self.num_rows
        self.bias = None if bias is None else keep(arena, bias)
        num_columns = count_columns(self.num_rows, self._width)
        self.weight = arena.take(num_columns * -(-self.in_features // WORD_BYTES) * WORD_BYTES)
        self.scales, self.sums = (
            arena.take(leaves * num_columns * WORD_BYTES).view(dtype).view(leaves, num_columns)
            for dtype in (torch.float32, torch.int32)
        )
        if parts[0].is_meta:
            # The caller fills the memory, as in CpuLinear.
            return
        if given is not None:
            self._fill(executor, given)
            return
        parts = [part if part.stride(1) == 1 else part.contiguous() for part in parts]
        columns = panel_columns(row_addresses(parts), self._width, gated=spec.gated)
        addresses = (self.weight.data_ptr(), self.scales.data_ptr(), self.sums.data_ptr())
        executor.pack_int8(columns, (self.in_features, ELEMENT_TYPES[parts[0].dtype], leaves), addresses)

    def _fill(self, executor: Executor, given: QuantizedWeight) -> None:
        levels = torch.nn.functional.pad(given.levels, (0, -self.in_features % WORD_BYTES)).contiguous()
        columns = panel_columns(row_addresses([levels]), self._width, gated=self.is_gated)
        executor.pack(columns, levels.shape[1] // WORD_BYTES, self.weight.data_ptr())
        order = _column_order(self.num_rows, self._width, gated=self.is_gated)
        self.scales[:] = _take_columns(given.scales[:, 0], order)
        sums = levels.view(self.num_rows, self.leaves, -1).sum(2, dtype=torch.int32)
        self.sums[:] = SHIFT * _take_columns(sums, order).T

    @property
    def num_bytes(self) -> int:
        bias_bytes = 0 if self.bias is None else self.bias.nbytes
        return self.weight.nbytes + self.scales.nbytes + self.sums.nbytes + bias_bytes

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns the dequantized weight [num_rows, in_features] float32, and a copy of the bias [num_rows]."""
        weight = panel_rows(
            self.weight.view(torch.int8), self.in_features, self._width, self.num_rows, gated=self.is_gated
        )
        scales = torch.stack(
            [panel_rows(leaf, 1, self._width, self.num_rows, gated=self.is_gated)[:, 0] for leaf in self.scales], dim=1
        )
        wide = weight.view(self.num_rows, self.leaves, -1) * scales[:, :, None]
        return wide.view(self.num_rows, self.in_features), None if self.bias is None else self.bias.clone()


class Int4Linear:
    """A 4-bit weight in panels, with scales and zero points for each group, and its bias. It is not a table."""

    is_table = False

    def __init__(
        self, executor: Executor, arena: Arena, weight: QuantizedWeight, bias: Tensor | None, spec: LinearSpec
    ) -> None:
        self.num_rows, self.in_features = weight.levels.shape
        self.group = weight.group
        leaves = self.leaves = spec.leaves
        if self.group not in GROUPS or self.in_features % (leaves * self.group):
            sizes = ", ".join(map(str, GROUPS))
            raise ValueError(
                f"{leaves} leaves of {self.in_features} inputs are no whole groups of one of {sizes}: {self.group}"
            )
        self.layout = f"panels of 4 bits in groups of {self.group}, a scale and a zero point for each output"
        self._width = executor.panel_columns
        self.is_gated, self.is_partial = spec.gated, spec.partial
        self.activation, self.logits = spec.activation, spec.logits
        self.out_features = self.num_rows // 2 if spec.gated else self.num_rows
        self.bias = None if bias is None else keep(arena, bias)
        self.order = None if weight.order is None else keep(arena, weight.order.to(torch.int32))
        num_panels = count_columns(self.num_rows, self._width) // self._width
        num_groups = self.in_features // self.group
        group_bytes = self._level_bytes + self._width * (SCALE_BYTES + ZERO_BYTES)
        self.weight = arena.take(num_panels * num_groups * group_bytes)
        self._groups = self.weight.view(num_panels, num_groups, group_bytes)
        if not weight.levels.is_meta:
            self._fill(weight)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weight, self.order, self.bias) if tensor is not None)

    @property
    def _level_bytes(self) -> int:
        """Bytes of the levels of one group in one panel."""
        return self._width * self.group // 2

    def _fill(self, weight: QuantizedWeight) -> None:
        assert weight.zeros is not None
        order = _column_order(self.num_rows, self._width, gated=self.is_gated)
        num_panels, num_groups, _ = self._groups.shape
        # [panels, columns, groups, words, halves, bytes].
        shape = (num_panels, self._width, num_groups, self.group // 8, 2, WORD_BYTES)
        halves = _take_columns(weight.levels, order).view(shape)
        words = (halves[..., 0, :] | halves[..., 1, :] << 4).permute(0, 2, 3, 1, 4)
        self._groups[..., : self._level_bytes] = words.flatten(2)
        place = self._level_bytes
        for values, dtype in ((weight.scales, torch.float32), (weight.zeros, torch.bfloat16)):
            by_group = _take_columns(values, order).view(num_panels, self._width, num_groups).transpose(1, 2)
            stored = by_group.to(dtype).contiguous().view(torch.uint8)
            self._groups[..., place : place + stored.shape[2]] = stored
            place += stored.shape[2]

    def _levels(self) -> QuantizedWeight:
        num_panels, num_groups, _ = self._groups.shape
        words = self._groups[..., : self._level_bytes]
        words = words.unflatten(2, (self.group // 8, self._width, WORD_BYTES)).permute(0, 3, 1, 2, 4)
        columns = torch.stack([words & 15, words >> 4], dim=4).reshape(num_panels * self._width, self.in_features)
        ends = (self._level_bytes, self._level_bytes + self._width * SCALE_BYTES, self._groups.shape[2])
        scales, zeros = (
            self._groups[..., begin:end].contiguous().view(dtype).transpose(1, 2).reshape(-1, num_groups)
            for begin, end, dtype in zip(ends[:-1], ends[1:], (torch.float32, torch.bfloat16), strict=True)
        )
        order = _column_order(self.num_rows, self._width, gated=self.is_gated)
        places = order.argsort()[(order < 0).sum() :]
        source = None if self.order is None else self.order.long()
        return QuantizedWeight(
            torch.float32, columns[places], scales[places].clone(), zeros[places].to(torch.uint8), source
        )

    def unpack(self) -> tuple[Tensor, Tensor | None]:
        """Returns the dequantized weight [num_rows, in_features] float32, and a copy of the bias [num_rows]."""
        return self._levels().dequantize(), None if self.bias is None else self.bias.clone()


def _column_order(num_rows: int, width: int, *, gated: bool) -> Tensor:
    """Returns the row index of each panel column; -1: the column has no row."""
    columns = panel_columns(np.arange(1, num_rows + 1, dtype=np.uintp), width, gated=gated)
    return torch.from_numpy(columns.astype(np.int64)) - 1


def _take_columns(rows: Tensor, order: Tensor) -> Tensor:
    """Takes rows in the order of `_column_order`; a column without a row gets zeros."""
    taken = rows.index_select(0, order.clamp(min=0))
    taken[order < 0] = 0
    return taken
