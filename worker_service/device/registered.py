"""Host memory that is registered with CUDA's runtime, so that a GPU reads and writes it while the host continues.

PyTorch's pinned memory would also work, but rounds sizes up to a power of two. Knows no pools.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

from blockyard.telemetry import EventLogger
from blockyard_kernels.cpu.huge_pages import map_huge

if TYPE_CHECKING:
    from torch import Tensor

log = EventLogger(__name__)


class MemoryRegistry(Protocol):
    """A registry of the host memory that a GPU can access."""

    def register(self, address: int, num_bytes: int) -> str:
        """Registers memory; returns an error text, or an empty text on success."""
        ...

    def unregister(self, address: int) -> None:
        """Unregisters memory, after all enqueued work that uses it is done."""


class CudaRegistry:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> str:
        """Registers memory with the runtime, which takes all its pages."""
        runtime: Any = torch.cuda.cudart()
        error = runtime.cudaHostRegister(address, num_bytes, 0)
        if error == runtime.cudaError.success:
            return ""
        # The runtime keeps the error and would raise it at the next launch: clear it.
        with suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        return str(runtime.cudaGetErrorString(error))

    def unregister(self, address: int) -> None:
        """Waits for the device, and unregisters the memory with the runtime."""
        torch.cuda.synchronize(self._device)
        runtime: Any = torch.cuda.cudart()
        runtime.cudaHostUnregister(address)


class _Memory(mmap.mmap):
    """Memory that is unregistered before it is unmapped."""

    registered: tuple[MemoryRegistry, int] | None = None

    def __del__(self) -> None:
        if self.registered is not None:
            registry, address = self.registered
            registry.unregister(address)


def allocate_registered(num_bytes: int, device: torch.device, registry: MemoryRegistry | None = None) -> Tensor:
    """Allocates zeros [num_bytes] uint8 for a GPU. If they cannot be registered, copies are correct but slow.

    Args:
        num_bytes: at least 1.
        device: a GPU.
        registry: CUDA's, if None.

    Raises:
        OSError: the system refuses to reserve the memory.
    """
    registry = registry or CudaRegistry(device)
    memory, tensor = map_huge(num_bytes, _Memory)
    if error := registry.register(tensor.data_ptr(), num_bytes):
        log.warning(
            "swaps will be slow: the host pool cannot be registered with the GPU",
            error=error,
            bytes=num_bytes,
            hint="choose a smaller --swap-space-gib, or raise the limits of memory and of locked memory",
        )
    else:
        memory.registered = registry, tensor.data_ptr()
    return tensor
