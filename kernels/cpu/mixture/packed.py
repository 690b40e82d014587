"""The experts of a layer, packed like other weights, at equal distances in one part of an arena."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from kernels.arena import ALIGNMENT, Arena

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from kernels.cpu.packed import CpuLinear
    from kernels.cpu.quantized import Int8Linear
    from kernels.mixture.ops import ExpertShape, ExpertWeights

    # (weight in parts, bias, arena, whether it is the first product) -> packed weight.
    Pack = Callable[[Sequence[Tensor], "Tensor | None", "_Range", bool], "CpuLinear | Int8Linear"]


class _Range:
    """Hands out pieces of one part of an arena. Has the methods of `kernels.arena.Arena` that packing needs."""

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
    """See `kernels.mixture.ops.PackedExperts`."""

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
        """The first expert's first product."""
        return self.linears[0]

    @property
    def down(self) -> CpuLinear | Int8Linear:
        """The first expert's second product."""
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
