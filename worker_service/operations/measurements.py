"""Looks at weights, blocks and memory; each function is one piece of work that fits between two steps.

Runs in the device thread. Knows neither states nor messages.
"""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING

import psutil
import torch

from worker_service.device import memory
from worker_service.operations.reports import Bandwidth, GarbageReport, MemoryReport, StrangeTensor, WeightNorm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from worker_service.cache_engine import CacheEngine
    from worker_service.models.description import Module, OtherModule
    from worker_service.set_up import SetUp

NUM_COPIES = 5


def find_strange(module: Module | OtherModule) -> tuple[int, list[StrangeTensor]]:
    """Counts a module's tensors, and finds those with numbers that are not finite."""
    found: list[StrangeTensor] = []
    names: list[str] = []
    for name, tensor in module.named_tensors():
        names.append(name)
        if not bool(tensor.isfinite().all()):
            found.append(StrangeTensor(name, int(tensor.isnan().sum()), int(tensor.isinf().sum())))
    return len(names), found


def find_strange_blocks(cache: CacheEngine, block_ids: Sequence[int]) -> list[int]:
    """Returns those of some device blocks that hold numbers that are not finite."""
    pool = cache.device_pool
    indices = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
    is_finite = pool.index_select(0, indices).isfinite().flatten(1).all(1)
    return [block_id for block_id, finite in zip(block_ids, is_finite.tolist(), strict=True) if not finite]


def measure_norms(module: Module | OtherModule, names: frozenset[str]) -> list[WeightNorm]:
    """Computes norms of a module's tensors: of those that are named, or of all."""
    found: list[WeightNorm] = []
    for name, tensor in module.named_tensors():
        if not names or name in names:
            wide = tensor.double()
            largest = float(wide.abs().max()) if wide.numel() else 0.0
            found.append(WeightNorm(name, tuple(tensor.shape), float(wide.norm()), largest))
    return found


def copies(device: torch.device, num_bytes: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the ways that bytes go: a name, where from, where to."""
    here = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    yield "copy", here, torch.ones_like(here)
    if device.type == "cuda":
        host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        yield "host to device", host, here
        yield "device to host", here, host


def measure_copy(name: str, source: Tensor, destination: Tensor) -> Bandwidth:
    """Measures the fastest of some copies."""
    fastest = float("inf")
    for _ in range(NUM_COPIES):
        _synchronize(destination.device, source.device)
        begin = time.perf_counter()
        destination.copy_(source)
        _synchronize(destination.device, source.device)
        fastest = min(fastest, time.perf_counter() - begin)
    return Bandwidth(name, source.nbytes / fastest)


def _synchronize(*devices: torch.device) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def summarize_memory(set_up: SetUp, device: torch.device) -> MemoryReport:
    """Reads what memory holds."""
    loaded, cache = set_up.loaded, set_up.cache
    on_gpu = device.type == "cuda"
    block_bytes = cache.cache_block_bytes if cache else 0
    return MemoryReport(
        device_total_bytes=memory.total_bytes(device),
        device_available_bytes=memory.room_for_weights(device),
        process_bytes=psutil.Process().memory_info().rss,
        weights_bytes=loaded.parameter_bytes if loaded else 0,
        device_blocks_bytes=cache.num_device_blocks * block_bytes if cache else 0,
        host_blocks_bytes=cache.num_host_blocks * block_bytes if cache else 0,
        allocated_bytes=torch.cuda.memory_allocated(device) if on_gpu else 0,
        reserved_bytes=torch.cuda.memory_reserved(device) if on_gpu else 0,
    )


def collect_garbage(device: torch.device) -> GarbageReport:
    """Runs Python's collector, and has allocators give back what they keep."""
    process, on_gpu = psutil.Process(), device.type == "cuda"
    before = process.memory_info().rss, torch.cuda.memory_reserved(device) if on_gpu else 0
    num_objects = gc.collect()
    memory.give_back(device)
    after = process.memory_info().rss, torch.cuda.memory_reserved(device) if on_gpu else 0
    return GarbageReport(num_objects, *(max(0, first - last) for first, last in zip(before, after, strict=True)))
