"""Ops that compute each row from that row only: norms, sums, and the activation outside of products."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from blockyard_kernels.cpu.library import Kind, Op

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.cpu.op_stream import OpStream


class RowOps:
    """The row ops of a backend: see `blockyard_kernels.ops.Backend`."""

    def __init__(self, ops: OpStream) -> None:
        self._ops = ops

    def rms_norm(
        self, hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        wide = is_wide(weight)
        return self._norm(Kind.RMS_NORM, hidden, residual, scale, weight, epsilon=epsilon, has_wide_norms=wide)

    def layer_norm(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        epsilon: float,
        residual: Tensor | None = None,
        scale: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        return self._norm(Kind.LAYER_NORM, hidden, residual, scale, weight, epsilon=epsilon, bias=address_of(bias))

    def _norm(
        self, kind: Kind, hidden: Tensor, residual: Tensor | None, scale: float, weight: Tensor | None, **fields: Any
    ) -> tuple[Tensor, Tensor]:
        hidden = hidden.contiguous()
        output = torch.empty_like(hidden)
        op = self._op(kind, hidden, output, scale, weight=address_of(weight), **fields)
        if residual is None:
            self._ops.emit(op, output)
            return output, hidden
        total, added = torch.empty_like(hidden), residual.contiguous()
        op.residual, op.total = added.data_ptr(), total.data_ptr()
        self._ops.emit(op, output, total)
        return output, total

    def add_normed(
        self, hidden: Tensor, weight: Tensor | None, epsilon: float, residual: Tensor, scale: float = 1.0
    ) -> Tensor:
        fields = {"weight": address_of(weight), "epsilon": epsilon, "has_wide_norms": is_wide(weight)}
        return self._add(Kind.ADD_NORMED, hidden, residual, scale, **fields)

    def add(self, hidden: Tensor, residual: Tensor, scale: float = 1.0) -> Tensor:
        return self._add(Kind.ADD, hidden, residual, scale)

    def _add(self, kind: Kind, hidden: Tensor, residual: Tensor, scale: float, **fields: Any) -> Tensor:
        hidden, residual = hidden.contiguous(), residual.contiguous()
        output = torch.empty_like(hidden)
        op = self._op(kind, hidden, output, scale, residual=residual.data_ptr(), **fields)
        self._ops.emit(op, output)
        return output

    def _op(self, kind: Kind, hidden: Tensor, output: Tensor, scale: float, **fields: Any) -> Op:
        rows = {"input": hidden.data_ptr(), "output": output.data_ptr(), "in_features": hidden.shape[1]}
        return self._ops.make(kind, **rows, scale=scale, **fields)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        output = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        op = self._ops.make(
            Kind.SILU_AND_MUL,
            input=gate_up.data_ptr(),
            output=output.data_ptr(),
            out_features=output.shape[1],
            input_stride=gate_up.shape[1],
        )
        self._ops.emit(op, output)
        return output


def address_of(tensor: Tensor | None) -> int | None:
    """Returns the address of a tensor, or None without a tensor."""
    return None if tensor is None else tensor.data_ptr()


def is_wide(weight: Tensor | None) -> bool:
    """Returns whether a norm's weight is float32, independent of the dtype of the rows."""
    return weight is not None and weight.dtype == torch.float32
