"""LoRA adapters of packed weights. Their factors are packed in panels, as weights are. See csrc/lora.h.

A slot is a pointer: putting an adapter into it copies nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import torch

from blockyard_kernels.arena import Arena, Chunks
from blockyard_kernels.cpu.huge_pages import allocate_huge
from blockyard_kernels.cpu.library import Executor, Library, LoraFactors
from blockyard_kernels.cpu.packed import WORD_BYTES, CpuLinear, panel_columns, row_addresses
from blockyard_kernels.cpu.quantized import Int4Linear, Int8Linear

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard_kernels.lora import PackedLora
    from blockyard_kernels.ops import PackedLinear

CHUNK_BYTES = 8 << 20
_Weight = CpuLinear | Int8Linear | Int4Linear


@dataclass(frozen=True, slots=True, eq=False)
class CpuLora:
    """The packed factors of one adapter. `width` is the adapter's width (rank), rounded up to whole words."""

    shrink: Tensor
    expand: Tensor
    width: int

    @property
    def num_bytes(self) -> int:
        return self.shrink.nbytes + self.expand.nbytes


class LoraRoom:
    """The slots of one weight, in an array that the kernels read."""

    def __init__(self, num_slots: int, max_width: int) -> None:
        self.max_width = max_width
        self._factors = (LoraFactors * num_slots)()
        # The factors point into these, so they have to stay alive.
        self._held: list[CpuLora | None] = [None] * num_slots

    @property
    def address(self) -> int:
        return ctypes.addressof(self._factors)

    def write(self, slot: int, lora: CpuLora | None) -> None:
        addresses = (None, None, 0) if lora is None else (lora.shrink.data_ptr(), lora.expand.data_ptr(), lora.width)
        self._factors[slot] = LoraFactors(*addresses)
        self._held[slot] = lora


class CpuLoraOps:
    """See `blockyard_kernels.lora.LoraOps`."""

    def __init__(self, library: Library, dtype: torch.dtype) -> None:
        self._library = library
        self._dtype = dtype
        self._rooms = WeakKeyDictionary[_Weight, LoraRoom]()
        self._packer: Executor | None = None
        self._chunks = Chunks(allocate_huge, CHUNK_BYTES)

    def find(self, weight: _Weight) -> LoraRoom | None:
        return self._rooms.get(weight)

    def make_room(self, packed: PackedLinear, num_slots: int, max_width: int, arena: Arena | None = None) -> int:
        """Gives a weight slots, which take no memory of their own."""
        weight = cast("_Weight", packed)
        width = self._whole_words(max_width)
        self._rooms[weight] = LoraRoom(num_slots, width)
        panel = self._library.panel_columns
        columns = -(-width // panel) * panel, -(-weight.num_rows // panel) * panel
        return (columns[0] * weight.in_features + columns[1] * width) * self._dtype.itemsize

    def pack(self, packed: PackedLinear, shrink: Tensor, expand: Tensor) -> PackedLora:
        """Packs factors in the calling thread only."""
        weight = cast("_Weight", packed)
        width = self._whole_words(len(shrink))
        missing = width - len(shrink)
        inner, outer = (
            torch.nn.functional.pad(factor.to(self._dtype), padding).contiguous()
            for factor, padding in ((shrink, (0, 0, 0, missing)), (expand, (0, missing)))
        )
        return CpuLora(self._pack(inner), self._pack(outer, gated=weight.is_gated), width)

    def _pack(self, factor: Tensor, *, gated: bool = False) -> Tensor:
        # The backend's threads are busy with steps, so packing has an executor of its own.
        packer = self._packer = self._packer or self._library.create_executor(1)
        columns = panel_columns(row_addresses([factor]), packer.panel_columns, gated=gated)
        num_words = factor.shape[1] * factor.itemsize // WORD_BYTES
        packed = self._chunks.take(len(columns) * num_words * WORD_BYTES)
        packer.pack(columns, num_words, packed.data_ptr())
        return packed

    def _whole_words(self, width: int) -> int:
        values = WORD_BYTES // self._dtype.itemsize
        return -(-width // values) * values

    def write(self, packed: PackedLinear, slot: int, lora: PackedLora | None) -> None:
        self._rooms[cast("_Weight", packed)].write(slot, cast("CpuLora | None", lora))
