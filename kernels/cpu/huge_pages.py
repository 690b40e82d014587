"""Memory in pages of 2 MiB, where the system gives them: for weights, KV and whatever else a step streams.

With small pages the processor waits for address translations: each page takes an entry in a small table.
"""

from __future__ import annotations

import mmap
from typing import TypeVar

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
# What a part of a chunk begins at: a cache line.
ALIGNMENT = 64

Mapping = TypeVar("Mapping", bound=mmap.mmap)


def allocate_huge(num_bytes: int) -> Tensor:
    """Allocates zeroed bytes [num_bytes] uint8 from a huge page's beginning; a page is taken when first written.

    Raises:
        OSError: the system does not promise that much.
    """
    return map_huge(num_bytes, mmap.mmap)[1]


def map_huge(num_bytes: int, kind: type[Mapping]) -> tuple[Mapping, Tensor]:
    """Allocates as `allocate_huge` does, in a mapping of some kind, which lives as long as the tensor's memory."""
    # Up to a page's end, so that the last one can be huge too.
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = kind(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return memory, whole[begin : begin + num_bytes]


class WeightMemory:
    """Hands out parts of large allocations. A chunk is freed with the last of its parts."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Returns bytes [num_bytes] uint8."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._chunk):
            self._chunk = allocate_huge(max(size, CHUNK_BYTES))
        part, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return part
