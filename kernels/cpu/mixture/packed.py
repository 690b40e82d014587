"""The experts of a layer, each packed as other weights are, at equal distances in one part of an arena."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from kernels.arena import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor

    from kernels.arena import Arena
    from kernels.cpu.packed import CpuLinear
    from kernels.cpu.quantized import Int8Linear
    from kernels.mixture.ops import ExpertShape, ExpertWeights

    # (weight in parts, bias, arena, whether it is the first product) -> what is held.
    Pack = Callable[[Sequence[Tensor], "Tensor | None", "_Range", bool], "CpuLinear | Int8Linear"]


class _Range:
    """Hands out parts of one part of an arena. Has what packing needs of `kernels.arena.Arena`."""

    def __init__(self, memory: Tensor | None = None) -> None:
        """`memory`: [any] uint8; None: parts have no memory, and are counted."""
        self._memory = memory
        self.used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """Returns bytes [num_bytes] uint8, from a multiple of 64 on."""
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
        """Bytes from what is held of one expert to that of the next."""
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
