"""Memory that keeps its addresses while its contents are given up. Weights and pools lie in it, so that recorded steps,
which name addresses, stay valid through sleep, reload and update.
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
        """Bytes handed out since the beginning, or since it was rewound."""
        ...

    @property
    def parts(self) -> list[Tensor]:
        """All that was handed out since then, in this order."""
        ...

    def take(self, num_bytes: int) -> Tensor:
        """Returns bytes [num_bytes] uint8, from a multiple of 64 on; zeros where they were not handed out before.

        Raises:
            OSError, MemoryError, RuntimeError: there are not so many.
        """
        ...

    def rewind(self) -> None:
        """Begins to hand out the same places once more: the same sizes in the same order get the same addresses."""
        ...

    def give_up(self, *, keeps: bool) -> None:
        """Gives the memory up, but for its addresses: nothing may be read or written until `restore`.

        If it `keeps` the contents, they are held in the host's memory; else they are lost.
        """
        ...

    def restore(self) -> None:
        """Takes memory at the same addresses: with the contents if these were kept, else zeros."""
        ...


class Chunks:
    """Hands out parts of chunks of memory, each of which is freed with the last of its parts. For one thread.

    Of things that come and go one after another few have parts of one chunk.
    """

    def __init__(self, allocate: Callable[[int], Tensor], chunk_bytes: int) -> None:
        """`allocate`: returns so many bytes [num_bytes] uint8."""
        self._allocate = allocate
        self._chunk_bytes = chunk_bytes
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Returns bytes [num_bytes] uint8, from a multiple of 64 on."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._rest):
            self._rest = self._allocate(max(size, self._chunk_bytes))
        part, self._rest = self._rest[:num_bytes], self._rest[size:]
        return part


def keep(arena: Arena, tensor: Tensor) -> Tensor:
    """Copies a tensor of any device into an arena, and returns the copy; of one on "meta" only the place is taken."""
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

    @abstractmethod
    def give_up(self, *, keeps: bool) -> None:
        """Gives the memory up, but for its addresses."""

    @abstractmethod
    def restore(self) -> None:
        """Takes memory at the same addresses."""

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
