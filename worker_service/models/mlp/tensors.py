"""The checkpoint tensors of a layer's experts: reads a rank's part of them, expert by expert, and restores it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from blockyard.model_config.names import ExpertLayout, ExpertNames
from blockyard_kernels.mixture.ops import ExpertWeights
from worker_service.models.projections import WHOLE, Cut, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from blockyard.model_config.decoder_config import Experts
    from blockyard_kernels.packed import PackedLinear

BLOCKS, SCALES = "_blocks", "_scales"
# MXFP4, of OCP Microscaling Formats (MX) 1.0: numbers of four bits with a scale for each 32 of them.
BLOCK = 32
# By the four bits: a sign, two of an exponent, one of a mantissa.
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# A scale is a power of two; of this number the exponent is 0. 255 stands for no number.
EXPONENT_BIAS, NO_NUMBER = 127, 255


class Read(Protocol):
    """Reads a rank's part of a tensor."""

    def __call__(
        self, name: str, *shape: int, part: Sequence[Sequence[slice]] = (), dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns a part of a tensor of this shape, in a dtype (None: the model's dtype)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTensors:
    """The tensors of a layer's experts in a checkpoint, and the part of them that a rank has."""

    prefix: str
    names: ExpertNames
    experts: Experts
    width: int
    """Hidden features."""
    inner: Cut
    """This rank's inner features."""

    def read(self, read: Read, contains: Callable[[str], bool]) -> Iterator[ExpertWeights]:
        """Yields the experts in order. Tensors that hold all experts are read once, before the first expert."""
        if self.names.layout is ExpertLayout.EXPERTS:
            yield from self._read_each(read)
        elif contains(self.prefix + self.names.gate + BLOCKS):
            yield from self._read_blocks(read)
        elif self.names.layout is ExpertLayout.STACKED:
            yield from self._read_stacked(read)
        else:
            yield from self._read_interleaved(read)

    @property
    def module(self) -> str:
        """The module that the experts are in, within its layer."""
        return self.names.router.rpartition(".")[0].removesuffix(".router") + ".experts"

    @property
    def tensor_names(self) -> frozenset[str]:
        """The names of the tensors that `restore` yields."""
        if self.names.layout is ExpertLayout.EXPERTS:
            return frozenset(name for number in range(self.experts.num_experts) for name in self._names_of(number))
        gate_up, _, down = self._names_of(0)
        biases = {f"{gate_up}_bias", f"{down}_bias"} if self.experts.has_bias else set[str]()
        return frozenset({gate_up, down} | biases)

    @property
    def _num_inner(self) -> int:
        return len(self.inner.units)

    def _read_each(self, read: Read) -> Iterator[ExpertWeights]:
        rows, columns = ((self.inner.part,),), (WHOLE, (self.inner.part,))
        for number in range(self.experts.num_experts):
            gate, up, down = self._names_of(number)
            yield ExpertWeights(
                [read(name, self.inner.size, self.width, part=rows) for name in (gate, up)],
                None,
                read(down, self.width, self.inner.size, part=columns),
                None,
            )

    def _names_of(self, number: int) -> tuple[str, str, str]:
        gate, up, down = (self.prefix + name for name in (self.names.gate, self.names.up, self.names.down))
        return gate.format(number), up.format(number), down.format(number)

    def _read_stacked(self, read: Read) -> Iterator[ExpertWeights]:
        count, size = self.experts.num_experts, self.inner.size
        gate_up, _, down = self._names_of(0)
        # A rank with all inner features takes the tensors unchanged.
        parts = WHOLE if self._num_inner == size else (self.inner.part, _moved(self.inner.part, size))
        first = read(gate_up, count, 2 * size, self.width, part=(WHOLE, parts))
        second = read(down, count, self.width, size, part=(WHOLE, WHOLE, (self.inner.part,)))
        for number in range(count):
            yield ExpertWeights([first[number]], None, second[number], None)

    def _read_interleaved(self, read: Read) -> Iterator[ExpertWeights]:
        count, size = self.experts.num_experts, self.inner.size
        gate_up, _, down = self._names_of(0)
        first = read(gate_up, count, self.width, 2 * size, part=(WHOLE, WHOLE, (self._pairs,)))
        second = read(down, count, size, self.width, part=(WHOLE, (self.inner.part,)))
        first_bias, second_bias = self._read_biases(read)
        for number in range(count):
            rows = first[number].t().contiguous()
            yield self._paired(rows, first_bias[number], second[number].t().contiguous(), second_bias[number])

    def _read_blocks(self, read: Read) -> Iterator[ExpertWeights]:
        count, size, byte = self.experts.num_experts, self.inner.size, torch.uint8
        gate_up, _, down = self._names_of(0)
        sizes, pairs = (count, 2 * size, self.width // BLOCK), (WHOLE, (self._pairs,))
        first = read(gate_up + BLOCKS, *sizes, BLOCK // 2, part=pairs, dtype=byte)
        first_scales = read(gate_up + SCALES, *sizes, part=pairs, dtype=byte)
        sizes = (count, self.width, size // BLOCK)
        second, second_scales = (
            read(down + BLOCKS, *sizes, BLOCK // 2, dtype=byte),
            read(down + SCALES, *sizes, dtype=byte),
        )
        first_bias, second_bias = self._read_biases(read)
        dtype = first_bias.dtype
        for number in range(count):
            rows = self._numbers(first[number], first_scales[number], dtype)
            # A rank's features need not end at the end of a block.
            columns = self._numbers(second[number], second_scales[number], dtype)
            columns = take(columns, (WHOLE, (self.inner.part,)))
            yield self._paired(rows, first_bias[number], columns, second_bias[number])

    @staticmethod
    def _numbers(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        if blocks.is_meta:
            return torch.empty(len(blocks), blocks.shape[1] * BLOCK, dtype=dtype, device="meta")
        return dequantize_mxfp4(blocks, scales, dtype)

    def _read_biases(self, read: Read) -> tuple[Tensor, Tensor]:
        count = self.experts.num_experts
        gate_up, _, down = self._names_of(0)
        first = read(f"{gate_up}_bias", count, 2 * self.inner.size, part=(WHOLE, (self._pairs,)))
        return first, read(f"{down}_bias", count, self.width)

    @property
    def _pairs(self) -> slice:
        """The slice of this rank's gates and ups, which are interleaved."""
        return slice(2 * self.inner.part.start, 2 * self.inner.part.stop)

    def _paired(self, rows: Tensor, bias: Tensor, down: Tensor, down_bias: Tensor) -> ExpertWeights:
        # Indexing a bias on the meta device would load torch's compiler.
        ordered = torch.empty_like(bias) if bias.is_meta else torch.cat([bias[::2], bias[1::2]])
        return ExpertWeights([rows[::2], rows[1::2]], ordered, down, down_bias)

    def restore(self, linears: Sequence[PackedLinear]) -> Iterator[tuple[str, Tensor]]:
        """Yields copies of this rank's parts of the experts' tensors, with the values that products use."""
        pairs = zip(linears[::2], linears[1::2], strict=True)
        if self.names.layout is ExpertLayout.EXPERTS:
            for number, (first, second) in enumerate(pairs):
                gates_ups = first.unpack()[0].chunk(2)
                yield from zip(self._names_of(number), (*gates_ups, second.unpack()[0]), strict=True)
            return
        gate_up, _, down = self._names_of(0)
        unpacked = [(first.unpack(), second.unpack()) for first, second in pairs]
        if self.names.layout is ExpertLayout.STACKED:
            yield gate_up, torch.stack([first for (first, _), _ in unpacked])
            yield down, torch.stack([second for _, (second, _) in unpacked])
            return
        yield gate_up, torch.stack([_side_by_side(first).t() for (first, _), _ in unpacked])
        yield f"{gate_up}_bias", torch.stack([_side_by_side(bias) for (_, bias), _ in unpacked if bias is not None])
        yield down, torch.stack([second.t() for _, (second, _) in unpacked])
        yield f"{down}_bias", torch.stack([bias for _, (_, bias) in unpacked if bias is not None])


def _moved(part: slice, distance: int) -> slice:
    return slice(part.start + distance, part.stop + distance)


def _side_by_side(gates_ups: Tensor) -> Tensor:
    """Puts each gate before its up."""
    return torch.stack(gates_ups.chunk(2), dim=1).flatten(0, 1)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Computes the numbers of MXFP4 rows -> [rows, in_features]: exact in bfloat16 and float32.

    Args:
        blocks: [rows, in_features / 32, 16] uint8, two numbers each, the first in the lower bits.
        scales: [rows, in_features / 32] uint8: exponents.
        dtype: of the result.
    """
    levels = torch.tensor(LEVELS, device=blocks.device)
    pairs = torch.stack([levels[(blocks & 15).long()], levels[(blocks >> 4).long()]], dim=-1)
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - EXPONENT_BIAS)
    factors = factors.masked_fill(scales == NO_NUMBER, torch.nan)
    return (pairs.flatten(-2) * factors[..., None]).flatten(-2).to(dtype)
