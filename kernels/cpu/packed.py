"""Packed weights, and the memory that they lie in: 2 MiB pages where the system gives them.

A decode streams every weight once, and with small pages the processor waits for their addresses.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.cpu.library import Library

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
# Rows of an arena begin here: a cache line.
ALIGNMENT = 64

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1}


def allocate_huge(num_bytes: int) -> Tensor:
    """Allocates zeroed bytes [num_bytes] uint8, in huge pages if there are any; a page is taken when first written."""
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[begin : begin + num_bytes]


class WeightMemory:
    """Hands out parts of large allocations. A part is given back with the last of its chunk."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Gives bytes [num_bytes] uint8."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._chunk):
            self._chunk = allocate_huge(max(size, CHUNK_BYTES))
        part, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return part


class CpuLinear:
    """A weight in panels, see csrc/linear.h, with its bias as it was given."""

    def __init__(
        self, library: Library, memory: WeightMemory, weight: Tensor, bias: Tensor | None, *, gated: bool
    ) -> None:
        num_rows, self.in_features = weight.shape
        self.num_rows, self.is_gated = num_rows, gated
        self.out_features = num_rows // 2 if gated else num_rows
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.contiguous()
        self.is_table = not gated
        if self.in_features * weight.itemsize % 4:
            raise ValueError(f"in_features must be even in {weight.dtype}, not {self.in_features}")
        num_panels = -(-num_rows // library.panel_columns)
        self.weight = memory.take(num_panels * library.panel_columns * self.in_features * weight.itemsize)
        dense = weight.contiguous()
        element_type = ELEMENT_TYPES[weight.dtype]
        library.pack(dense.data_ptr(), (num_rows, self.in_features), element_type, gated, self.weight.data_ptr())

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
