"""Memory in pages of 2 MiB, where the system gives them: for weights, KV and whatever else a step streams.

With small pages the processor waits for address translations: each page takes an entry in a small table.
"""

from __future__ import annotations

import mmap
from typing import TypeVar

import torch
from torch import Tensor

from kernels.arena import ChunkedArena

HUGE_PAGE_BYTES = 2 << 20

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


class HostArena(ChunkedArena):
    """See `kernels.arena.Arena`: in the host's memory. Pages are taken when first written."""

    def __init__(self) -> None:
        super().__init__()
        self._mappings: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> Tensor:
        mapping, memory = map_huge(num_bytes, mmap.mmap)
        self._mappings.append(mapping)
        return memory

    def give_up(self, *, keeps: bool) -> None:
        """Gives the pages up. What is kept stays where it is: in the host's memory."""
        if not keeps:
            for mapping in self._mappings:
                mapping.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Does nothing: the system allocates pages when they are first written."""
