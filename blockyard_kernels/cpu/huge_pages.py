"""Memory in huge pages of 2 MiB, if the system provides them, for weights, KV pools and other data that a step streams.

With small pages the processor waits for address translations, since the TLB has an entry for each page and is small.
"""

from __future__ import annotations

import mmap
from typing import TypeVar

import torch
from torch import Tensor

from blockyard_kernels.arena import ChunkedArena

HUGE_PAGE_BYTES = 2 << 20

Mapping = TypeVar("Mapping", bound=mmap.mmap)


def allocate_huge(num_bytes: int) -> Tensor:
    """Allocates zeros [num_bytes] uint8 at the start of a huge page. The system allocates a page at its first write.

    Raises:
        OSError: the system refuses to reserve the memory.
    """
    return map_huge(num_bytes, mmap.mmap)[1]


def map_huge(num_bytes: int, kind: type[Mapping]) -> tuple[Mapping, Tensor]:
    """Like `allocate_huge`, but in a mapping of class `kind`, which lives as long as the tensor's memory."""
    # Rounded up to whole huge pages, so that the last page can be huge too.
    size = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = kind(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return memory, whole[begin : begin + num_bytes]


class HostArena(ChunkedArena):
    """See `blockyard_kernels.arena.Arena`: in host memory. The system allocates a page at its first write."""

    def __init__(self) -> None:
        super().__init__()
        self._mappings: list[mmap.mmap] = []

    def allocate(self, num_bytes: int) -> Tensor:
        mapping, memory = map_huge(num_bytes, mmap.mmap)
        self._mappings.append(mapping)
        return memory

    def give_up(self, *, keeps: bool) -> None:
        """Releases the pages. If the contents are kept, it does nothing: they are in host memory already."""
        if not keeps:
            for mapping in self._mappings:
                mapping.madvise(mmap.MADV_DONTNEED)

    def restore(self) -> None:
        """Does nothing: the system allocates pages when they are first written."""
