"""An arena on a GPU: its addresses stay reserved while physical memory is mapped there, unmapped and mapped again.

It calls the CUDA driver directly; torch's allocator does not know this memory. It has not run on a GPU yet.
See https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from blockyard_kernels.arena import ChunkedArena

_PINNED, _DEVICE, _READ_AND_WRITE = 1, 1, 3
_SUCCESS, _OUT_OF_MEMORY = 0, 2


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location_type", ctypes.c_int), ("location_id", ctypes.c_int), ("flags", ctypes.c_int))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    """Calls a function of the driver; raises OutOfMemoryError or RuntimeError."""
    error = getattr(_driver(), name)(*arguments)
    if error == _OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the GPU has no memory left")
    if error != _SUCCESS:
        raise RuntimeError(f"{name} failed with CUDA's error {error}")


@dataclass(frozen=True, slots=True)
class _Range:
    """A range of reserved addresses. torch makes a tensor of it by `__cuda_array_interface__`."""

    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


class CudaArena(ChunkedArena):
    """See `blockyard_kernels.arena.Arena`: in GPU memory, which is free for other uses from `give_up` to `restore`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        index = device.index or 0
        self._properties = _Properties(type=_PINNED, location_type=_DEVICE, location_id=index)
        self._access = _Access(_DEVICE, index, _READ_AND_WRITE)
        # Creates the CUDA context that the driver calls need.
        torch.cuda.synchronize(device)
        granularity = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
        self._granularity = granularity.value
        self._ranges: list[_Range] = []
        self._handles: list[ctypes.c_uint64] = []
        self._copies: list[Tensor] | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Reserves addresses permanently and maps memory there."""
        size = -(-num_bytes // self._granularity) * self._granularity
        address = ctypes.c_uint64()
        none = ctypes.c_uint64(0)
        _call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_size_t(0), none, none)
        place = _Range(address.value, size)
        self._map(place)
        self._ranges.append(place)
        return torch.as_tensor(place, device=self._device)[:num_bytes].zero_()

    def _map(self, place: _Range) -> None:
        handle, none = ctypes.c_uint64(), ctypes.c_uint64(0)
        address, size = ctypes.c_uint64(place.address), ctypes.c_size_t(place.num_bytes)
        _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), none)
        _call("cuMemMap", address, size, ctypes.c_size_t(0), handle, none)
        _call("cuMemSetAccess", address, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        self._handles.append(handle)

    def give_up(self, *, keeps: bool) -> None:
        """Returns the memory to the GPU; contents that are kept are copied to pinned host memory."""
        torch.cuda.synchronize(self._device)
        if keeps:
            self._copies = [torch.empty(len(each), dtype=torch.uint8, pin_memory=True) for each in self.chunks]
            for copy, chunk in zip(self._copies, self.chunks, strict=True):
                copy.copy_(chunk)
        elif not self._handles:
            # The memory was released before, and its saved contents are not needed any more.
            self._copies = None
        for place, handle in zip(self._ranges, self._handles, strict=bool(self._handles)):
            _call("cuMemUnmap", ctypes.c_uint64(place.address), ctypes.c_size_t(place.num_bytes))
            _call("cuMemRelease", handle)
        self._handles = []

    def restore(self) -> None:
        """Maps memory at the same addresses."""
        for place in self._ranges[len(self._handles) :]:
            self._map(place)
        for index, chunk in enumerate(self.chunks):
            if self._copies is not None:
                chunk.copy_(self._copies[index])
            else:
                chunk.zero_()
        self._copies = None
        torch.cuda.synchronize(self._device)
