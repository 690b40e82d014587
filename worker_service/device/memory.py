"""Reads the memory of a device, and this process's use of it.

Knows no model: sizes are numbers. `blockyard.capacity.memory` decides how much memory blocks get.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from blockyard.capacity.memory import ControlGroups, Usage, read_host_memory, read_text


def room_for_weights(device: torch.device, groups: ControlGroups | None = None) -> int:
    """Returns the bytes that this process can still allocate on a device for weights."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return read_host_memory(groups).available_bytes


def total_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU's memory, or of the host memory that this process may use."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else read_host_memory().total_bytes


def is_exhausted(error: Exception) -> bool:
    """Returns whether an error means that memory ran out. On a CPU torch has no separate exception for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def ends_device(error: Exception) -> bool:
    """Returns whether an error of a GPU means that nothing can be computed on it any more in this process.

    After an illegal address, for example, every call of CUDA in the same process fails with the same error.
    """
    # Triton raises no class of its own.
    is_of_gpu = isinstance(error, torch.AcceleratorError) or "Triton Error [CUDA]" in str(error)
    return is_of_gpu and "out of memory" not in str(error)


def give_back(device: torch.device) -> None:
    """Makes allocators return freed memory that they keep to the system."""
    # Only GNU's C library has this function.
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compute_threads(requested: int, groups: ControlGroups | None = None) -> int:
    """Chooses the number of compute threads: the requested one, or torch's within the control group's quota."""
    if requested:
        return requested
    quota = (groups or ControlGroups()).num_cpus()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), usable, quota or usable))


def gpu_free_bytes(device: torch.device) -> int:
    """Counts the free bytes, including those that torch's allocator keeps without using them."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def gpu_foreign_bytes(device: torch.device) -> int:
    """Counts the bytes that torch's allocator in this process does not know: libraries, contexts, other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def gpu_usage(device: torch.device, foreign_bytes: int, weights_bytes: int, activation_bytes: int) -> Usage:
    """Adds up the memory on a GPU, given the foreign bytes when the device was chosen.

    The given bytes belong to other processes and are left out, so that several workers can share a GPU. Foreign bytes
    that were added since then count as `other`.
    """
    free, total = gpu_free_bytes(device), total_bytes(device)
    other = max(0, gpu_foreign_bytes(device) - foreign_bytes)
    other += max(0, torch.cuda.memory_allocated(device) - weights_bytes)
    return Usage(total, free, weights_bytes, activation_bytes, other)


def reset_peak_memory() -> bool:
    """Resets this process's peak memory; returns False if the system does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def read_peak_memory() -> int:
    """Returns this process's peak since `reset_peak_memory`, in bytes."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss
