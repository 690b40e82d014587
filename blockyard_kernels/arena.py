"""Arenas: memory that can be released and restored at the same addresses.

Weights and KV pools lie in arenas. Captured steps contain addresses, and so stay valid through sleep, reload and weight
updates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

CHUNK_BYTES = 64 << 20
# Parts of a chunk begin at a multiple of this: a cache line.
ALIGNMENT = 64


class Arena(Protocol):
    """Hands out parts of memory of one device. Used by one thread at a time."""

    @property
    def used_bytes(self) -> int:
        """Bytes handed out since the start or the last `rewind`."""
        ...

    @property
    def parts(self) -> list[Tensor]:
        """The parts handed out since the start or the last `rewind`, in order."""
        ...

    def take(self, num_bytes: int) -> Tensor:
        """Returns a uint8 tensor [num_bytes] at a multiple of 64. Memory that was never handed out before is zero.

        Raises:
            OSError, MemoryError, RuntimeError: there is not enough memory.
        """
        ...

    def rewind(self) -> None:
        """Hands out the memory from the beginning again: the same sizes in the same order get the same addresses."""

    def give_up(self, *, keeps: bool) -> None:
        """Releases the memory but reserves its addresses: nothing may be read or written until `restore`.

        If `keeps`, the contents are saved in host memory; otherwise they are lost.
        """

    def restore(self) -> None:
        """Allocates the memory at the same addresses again, with the saved contents, or zeros if none were saved."""


class Chunks:
    """Hands out parts of larger chunks of memory. A chunk is freed together with the last of its parts. For one thread.

    Consecutive parts share a chunk, so that a chunk belongs to a few objects, which were allocated one after another.
    """

    def __init__(self, allocate: Callable[[int], Tensor], chunk_bytes: int) -> None:
        """`allocate`: takes a number of bytes, and returns a uint8 tensor [num_bytes]."""
        self._allocate = allocate
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Returns a uint8 tensor [num_bytes] at a multiple of 64."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._rest):
            self._rest = self._allocate(max(size, self._chunk_bytes))
        part, self._rest = self._rest[:num_bytes], self._rest[size:]
        return part


def keep(arena: Arena, tensor: Tensor) -> Tensor:
    """Copies a tensor from any device into an arena and returns the copy. For a meta tensor it only takes memory."""
    copy = arena.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
    if not tensor.is_meta:
        copy.copy_(tensor)
    return copy


class ChunkedArena(ABC):
    """Hands out parts of large allocations, each part in the first one that has room. See `Arena`."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.chunks: list[Tensor] = []
        self.parts: list[Tensor] = []
        self._offsets: list[int] = []

    @abstractmethod
    def allocate(self, num_bytes: int) -> Tensor:
        """Allocates zeros [num_bytes] uint8 for good."""
        ...

    @abstractmethod
    def give_up(self, *, keeps: bool) -> None:
        """See `Arena.give_up`."""

    @abstractmethod
    def restore(self) -> None:
        """See `Arena.restore`."""

    def take(self, num_bytes: int) -> Tensor:
        """Returns bytes [num_bytes] uint8."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        self.used_bytes += size
        rooms = (index for index, chunk in enumerate(self.chunks) if self._offsets[index] + size <= len(chunk))
        index = next(rooms, None)
        if index is None:
            index = len(self.chunks)
            self.chunks.append(self.allocate(max(size, CHUNK_BYTES)))
            self._offsets.append(0)
        begin = self._offsets[index]
        self._offsets[index] += size
        self.parts.append(self.chunks[index][begin : begin + num_bytes])
        return self.parts[-1]

    def rewind(self) -> None:
        """Begins to hand out the same places once more."""
        self.used_bytes = 0
        self.parts = []
        self._offsets = [0] * len(self.chunks)


class LastingArena(ChunkedArena):
    """An arena on a device whose memory cannot be released while its addresses stay."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def give_up(self, *, keeps: bool) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError("this memory cannot be given up")

    def restore(self) -> None:
        """Does nothing: the memory was never released."""
