"""The MoE ops as `Op` structures, which are executed at once or recorded (`OpStream`)."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch

from blockyard_kernels.arena import ALIGNMENT, Arena
from blockyard_kernels.cpu.huge_pages import HostArena
from blockyard_kernels.cpu.library import ACTIVATIONS, Joint, Kind
from blockyard_kernels.cpu.packed import CpuLinear
from blockyard_kernels.shapes import PLAIN_LINEAR, Activation, LinearSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from blockyard_kernels.cpu.op_stream import OpStream
    from blockyard_kernels.cpu.products import Products
    from blockyard_kernels.cpu.quantized import Int8Linear
    from blockyard_kernels.mixture.ops import ExpertShape, ExpertWeights, PackedExperts, Router
    from blockyard_kernels.packed import PackedLinear

    Pack = Callable[[Sequence[Tensor], "Tensor | None", "_Range", bool], "CpuLinear | Int8Linear"]


class _Range:
    """Hands out pieces of one part of an arena. Has what packing needs of `blockyard_kernels.arena.Arena`."""

    def __init__(self, memory: Tensor | None = None) -> None:
        """`memory`: [any] uint8; None: `take` returns meta tensors and only counts their bytes."""
        self._memory = memory
        self.used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """Returns a uint8 tensor [num_bytes] at a multiple of 64."""
        begin, size = self.used_bytes, -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.used_bytes += size
        if self._memory is None:
            return torch.empty(num_bytes, dtype=torch.uint8, device="meta")
        return self._memory[begin : begin + num_bytes]


class CpuExperts:
    """See `blockyard_kernels.mixture.ops.PackedExperts`."""

    def __init__(self, pack: Pack, arena: Arena, experts: Iterable[ExpertWeights], shape: ExpertShape) -> None:
        self.shape = shape
        rest = iter(experts)
        first = next(rest)
        counted = _Range()
        _pack_expert(pack, _without_numbers(first), counted)
        self.stride = counted.used_bytes
        """Bytes from the packed weights of one expert to those of the next."""
        held = _Range(arena.take(shape.num_experts * self.stride))
        self.linears: Sequence[CpuLinear | Int8Linear] = [
            linear for weights in chain([first], rest) for linear in _pack_expert(pack, weights, held)
        ]

    @property
    def gate_up(self) -> CpuLinear | Int8Linear:
        return self.linears[0]

    @property
    def down(self) -> CpuLinear | Int8Linear:
        return self.linears[1]


def _pack_expert(pack: Pack, weights: ExpertWeights, held: _Range) -> tuple[CpuLinear | Int8Linear, ...]:
    return (
        pack(weights.gate_up, weights.gate_up_bias, held, True),
        pack([weights.down], weights.down_bias, held, False),
    )


def _without_numbers(weights: ExpertWeights) -> ExpertWeights:
    def bare(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty_like(tensor, device="meta")

    return weights._replace(
        gate_up=[torch.empty_like(part, device="meta") for part in weights.gate_up],
        gate_up_bias=bare(weights.gate_up_bias),
        down=torch.empty_like(weights.down, device="meta"),
        down_bias=bare(weights.down_bias),
    )


class CpuMixtureOps:
    """See `blockyard_kernels.mixture.ops.MixtureOps`."""

    def __init__(self, ops: OpStream, products: Products, linear_type: type[CpuLinear | Int8Linear]) -> None:
        self._ops = ops
        self._products = products
        self._linear_type = linear_type

    def pack_router(self, weight: Tensor, bias: Tensor | None, arena: Arena | None = None) -> PackedLinear:
        return CpuLinear(self._ops.executor, arena or HostArena(), [weight], bias, PLAIN_LINEAR)

    def pack_experts(
        self, experts: Iterable[ExpertWeights], shape: ExpertShape, arena: Arena | None = None
    ) -> PackedExperts:
        def pack(weights: Sequence[Tensor], bias: Tensor | None, held: Any, gated: bool) -> CpuLinear | Int8Linear:
            gate_up = LinearSpec(gated=True, activation=shape.activation)
            down = LinearSpec(leaves=shape.leaves, partial=shape.partial)
            return self._linear_type(self._ops.executor, held, weights, bias, gate_up if gated else down)

        return CpuExperts(pack, arena or HostArena(), experts, shape)

    def route(self, hidden: Tensor, packed: PackedLinear, router: Router) -> tuple[Tensor, Tensor]:
        logits = self._products.linear(hidden, cast("CpuLinear", packed), wide=True)
        ids = torch.empty(len(hidden), router.top_k, dtype=torch.int32)
        weights = torch.empty(len(hidden), router.top_k)
        op = self._ops.make(
            Kind.ROUTE,
            input=logits.data_ptr(),
            expert_ids=ids.data_ptr(),
            expert_weights=weights.data_ptr(),
            num_experts=logits.shape[1],
            top_k=router.top_k,
            renormalises=router.renormalises,
            is_sigmoid=router.is_sigmoid,
            bias=None if router.choice_bias is None else router.choice_bias.data_ptr(),
            scale=router.scale,
        )
        self._ops.emit(op, ids, weights)
        return ids, weights

    def experts(self, hidden: Tensor, ids: Tensor, weights: Tensor, packed: PackedExperts) -> Tensor:
        held = cast("CpuExperts", packed)
        shape, first, second = held.shape, held.gate_up, held.down
        num_rows, top_k, width = len(hidden), ids.shape[1], hidden.shape[1]
        places = torch.empty_like(ids)
        routed = {
            "expert_ids": ids.data_ptr(),
            "expert_places": places.data_ptr(),
            "num_experts": shape.num_experts,
            "top_k": top_k,
            "expert_stride": held.stride,
        }
        # `gathered` has copies of all rows in the order of experts. In a plan `sums` reuses its memory, so both have
        # the same size.
        gathered, inner, sums = (
            torch.empty(num_rows, top_k * width),
            hidden.new_empty(num_rows, top_k * first.out_features),
            torch.empty(num_rows, top_k * width),
        )
        rows = hidden.contiguous()
        op = self._ops.make(Kind.EXPERTS_GATHER, input=rows.data_ptr(), input_stride=width, in_features=width, **routed)
        op.output = gathered.data_ptr()
        self._ops.emit(op, gathered, places)
        op = self._products.linear_op(Kind.EXPERTS_GATE_UP, gathered, first, input_stride=width, **routed)
        op.output, op.limit = inner.data_ptr(), shape.limit
        op.activation = ACTIVATIONS[shape.activation or Activation.SILU]
        self._ops.emit(op, inner)
        op = self._products.linear_op(Kind.EXPERTS_DOWN, inner, second, input_stride=first.out_features, **routed)
        bias, op.bias, op.output = op.bias, None, sums.data_ptr()
        self._ops.emit(op, sums)
        if shape.partial:
            self._ops.meet(Joint.ADD, sums)
        output = torch.empty_like(rows)
        op = self._ops.make(Kind.EXPERTS_COMBINE, input=sums.data_ptr(), bias=bias, out_features=width, **routed)
        op.output, op.expert_weights = output.data_ptr(), weights.data_ptr()
        self._ops.emit(op, output)
        return output
