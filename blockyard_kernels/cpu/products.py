"""Products of rows and packed weights as ops, for whole and for partial weights, with and without LoRA adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockyard_kernels.cpu.library import ACTIVATIONS, Joint, Kind, Op, Scheme
from blockyard_kernels.cpu.packed import CpuLinear
from blockyard_kernels.cpu.quantized import Int4Linear, Int8Linear

if TYPE_CHECKING:
    from blockyard_kernels.cpu.lora import CpuLoraOps, LoraRoom
    from blockyard_kernels.cpu.op_stream import OpStream
    from blockyard_kernels.lora import LoraRows

CpuWeight = CpuLinear | Int8Linear | Int4Linear


class Products:
    def __init__(self, ops: OpStream, dtype: torch.dtype, loras: CpuLoraOps) -> None:
        self._ops = ops
        self._dtype = dtype
        self._loras = loras

    def linear(self, hidden: Tensor, weight: CpuWeight, *, wide: bool = False, lora: LoraRows | None = None) -> Tensor:
        """Multiplies rows by a packed weight: see `blockyard_kernels.ops.Backend`."""
        rows = hidden if hidden.stride(1) == 1 and hidden.stride(0) * hidden.itemsize % 4 == 0 else hidden.contiguous()
        if weight.is_partial:
            return self._partial_linear(rows, weight, lora)
        output = torch.empty(rows.shape[0], weight.out_features, dtype=torch.float32 if wide else self._dtype)
        op = self.linear_op(Kind.LINEAR_GATED if weight.is_gated else Kind.LINEAR, rows, weight)
        op.output, op.wide = output.data_ptr(), int(wide)
        op.activation = 0 if wide else ACTIVATIONS[weight.activation]
        room = self._loras.find(weight) if lora is not None else None
        if room is not None:
            width = room.max_width
            low_rank = torch.empty(len(rows), width, dtype=self._dtype)
            self._ops.emit(self._shrink_op(rows, weight, room, low_rank), low_rank, lora=lora)
            op.lora, op.low_rank, op.low_rank_stride = room.address, low_rank.data_ptr(), width
        self._ops.emit(op, output, lora=lora)
        return output

    def _partial_linear(self, rows: Tensor, weight: CpuWeight, lora: LoraRows | None) -> Tensor:
        """Multiplies by a partial weight, all-reduces the float32 sums over the ranks, then adds the bias and rounds.

        `sums` holds the sums [R, width] of all rows, and behind them the products of the LoRA `shrink` factors
        [R, max_width], so that one all-reduce adds both.
        """
        width, room = weight.out_features, self._loras.find(weight) if lora is not None else None
        sums = torch.empty(len(rows), width + (room.max_width if room else 0))
        op = self.linear_op(Kind.LINEAR, rows, weight)
        bias, op.bias, op.output, op.wide = op.bias, None, sums.data_ptr(), 1
        self._ops.emit(op, sums)
        if room is not None:
            op = self._shrink_op(rows, weight, room, sums)
            op.wide, op.low_rank_offset = 1, width
            self._ops.emit(op, sums, lora=lora)
        self._ops.meet(Joint.ADD, sums, always=width)
        rounded = torch.empty(len(rows), width, dtype=self._dtype)
        op = self._ops.make(Kind.ROUND, input=sums.data_ptr(), bias=bias, out_features=width, input_stride=width)
        op.output = rounded.data_ptr()
        self._ops.emit(op, rounded)
        if room is not None:
            op = self._ops.make(Kind.LORA_EXPAND, input=sums.data_ptr(), bias=bias, out_features=width)
            op.output, op.lora, op.low_rank = rounded.data_ptr(), room.address, sums.data_ptr()
            op.low_rank_stride, op.low_rank_offset = room.max_width, width
            self._ops.emit(op, rounded, lora=lora)
        return rounded

    def _shrink_op(self, rows: Tensor, weight: CpuWeight, room: LoraRoom, output: Tensor) -> Op:
        return self._ops.make(
            Kind.LORA_SHRINK,
            input=rows.data_ptr(),
            output=output.data_ptr(),
            lora=room.address,
            in_features=weight.in_features,
            out_features=room.max_width,
            input_stride=rows.stride(0),
            leaves=weight.leaves,
        )

    def linear_op(self, kind: Kind, rows: Tensor, weight: CpuWeight, **others: Any) -> Op:
        """Makes the op of a product, without its output. `others`: further fields of the op."""
        fields = {"input_stride": rows.stride(0), **others}
        op = self._ops.make(
            kind,
            input=rows.data_ptr(),
            weight=weight.weight.data_ptr(),
            bias=None if weight.bias is None else weight.bias.data_ptr(),
            in_features=weight.in_features,
            out_features=weight.num_rows,
            leaves=weight.leaves,
            scale=weight.logits.scale,
            softcap=weight.logits.softcap,
            **fields,
        )
        if isinstance(weight, Int8Linear):
            op.scheme, op.scales, op.sums = Scheme.INT8, weight.scales.data_ptr(), weight.sums.data_ptr()
        elif isinstance(weight, Int4Linear):
            op.scheme, op.group = Scheme.INT4, weight.group
            op.order = None if weight.order is None else weight.order.data_ptr()
        return op
