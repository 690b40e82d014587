"""Reads how much memory this machine has, and counts the blocks that fit beside a worst-case step.

Contains the reading of limits (control groups, /proc) and the arithmetic. Callers pass in the model's sizes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from blockyard.contract.workers import AvailableBlocks, MemoryBreakdown

if TYPE_CHECKING:
    from collections.abc import Mapping

# Cached files are reclaimable, the model's own included; mapped files (programs and libraries) are not.
_CACHED_FILES = {"inactive_file": 1, "active_file": 1, "file_mapped": -1}
_CACHED_FILES_1 = {"total_inactive_file": 1, "total_active_file": 1, "total_mapped_file": -1}
# Memory that the allocator, fragmentation and growing lists may take beyond the profile, on a CPU.
CPU_RESERVE_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the machine or of this process's container, in bytes."""

    total_bytes: int
    available_bytes: int
    process_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """A device's memory before it has KV blocks, in bytes. `available_bytes` are free for any process."""

    total_bytes: int
    available_bytes: int
    weights_bytes: int
    activation_bytes: int
    other_bytes: int

    def divide(self, budget_bytes: int, cache_bytes: int) -> MemoryBreakdown:
        """Returns the breakdown of a budget of which `cache_bytes` go to KV blocks."""
        return MemoryBreakdown(
            self.total_bytes,
            budget_bytes,
            self.weights_bytes,
            self.activation_bytes,
            self.other_bytes,
            cache_bytes,
        )


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """The control groups of this process: where they are mounted, and the file that names them."""

    mount: Path = Path("/sys/fs/cgroup")
    membership: Path = Path("/proc/self/cgroup")

    def memory(self) -> tuple[int, int] | None:
        """Returns the tightest limit on this process and the bytes still free below it; None: no limit."""
        limits = [
            *self._levels("", "memory.max", "memory.current", _CACHED_FILES),
            *self._levels("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", _CACHED_FILES_1),
        ]
        return min(limits, key=lambda pair: pair[1], default=None)

    def num_cpus(self) -> int | None:
        """Returns the tightest quota as a number of processors, rounded up; None: no quota."""
        quotas: list[float] = []
        for folder in self._folders(""):
            quota, _, period = read_text(folder / "cpu.max").partition(" ")
            if quota.isdigit() and period.strip().isdigit():
                quotas.append(int(quota) / int(period))
        for folder in self._folders("cpu"):
            quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
            if quota.isdigit() and period.isdigit():
                quotas.append(int(quota) / int(period))
        return math.ceil(min(quotas)) if quotas else None

    def _levels(self, controller: str, limit: str, usage: str, reclaimable: Mapping[str, int]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for folder in self._folders(controller):
            limit_bytes, used_bytes = read_text(folder / limit), read_text(folder / usage)
            # Version 1 says "no limit" with a number near 2**63.
            if not limit_bytes.isdigit() or int(limit_bytes) >= 1 << 60:
                continue
            used = int(used_bytes) if used_bytes.isdigit() else 0
            statistics = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
            cached = sum(sign * int(statistics.get(name, 0)) for name, sign in reclaimable.items())
            found.append((int(limit_bytes), max(0, int(limit_bytes) - used + max(0, cached))))
        return found

    def _folders(self, controller: str) -> list[Path]:
        """Lists the folders of this process's group and of its ancestors; `controller` is empty for version 2."""
        root = self.mount / controller
        for line in read_text(self.membership).splitlines():
            _, controllers, path = line.split(":", 2)
            if (controller in controllers.split(",")) if controller else controllers == "":
                group = root / path.strip("/")
                return [group, *(parent for parent in group.parents if parent == root or root in parent.parents)]
        # In a container the mount may show the process's own group, while /proc names the host's path.
        return [root]


def read_text(path: Path) -> str:
    """Reads a small system file; returns an empty text if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_host_memory(groups: ControlGroups | None = None) -> HostMemory:
    """Reads the memory that this process may use: the machine's, or a control group's lower limit."""
    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit = (groups or ControlGroups()).memory()
    if limit is not None:
        total, available = min(total, limit[0]), min(available, limit[1])
    return HostMemory(total, available, psutil.Process().memory_info().rss)


def cpu_usage(host: HostMemory, weights_bytes: int, activation_bytes: int) -> Usage:
    """Returns a CPU's usage; everything that the process holds beyond its weights counts as `other_bytes`."""
    other = max(0, host.process_bytes - weights_bytes) + CPU_RESERVE_BYTES
    available = host.available_bytes - CPU_RESERVE_BYTES
    return Usage(host.total_bytes, available, weights_bytes, activation_bytes, other)


def plan_cache(
    usage: Usage,
    *,
    block_size: int,
    block_bytes: int,
    utilization: float,
    swap_space_bytes: int,
    host_shares_device: bool,
    max_useful_blocks: int,
) -> AvailableBlocks:
    """Divides the memory that weights and steps leave into device and host blocks.

    Args:
        usage: the device's memory before it has blocks.
        block_size: tokens of a block.
        block_bytes: bytes of a block over all layers of a KV group.
        utilization: the share of the device's memory to use in total, in (0, 1].
        swap_space_bytes: requested bytes of the host pool.
        host_shares_device: both pools lie in one memory (a CPU): the host pool takes at most half of it.
        max_useful_blocks: the most device blocks to plan.
    """
    budget = int(usage.total_bytes * utilization)
    cache = budget - usage.weights_bytes - usage.activation_bytes - usage.other_bytes
    # Other processes take memory too: do not plan more than is free now.
    cache = max(0, min(cache, usage.available_bytes - usage.activation_bytes))
    if host_shares_device:
        swap_space_bytes = min(swap_space_bytes, cache // 2)
    num_host_blocks = swap_space_bytes // block_bytes
    for_device = cache - num_host_blocks * block_bytes if host_shares_device else cache
    num_device_blocks = min(for_device // block_bytes, max_useful_blocks)
    return AvailableBlocks(
        block_size, num_device_blocks, num_host_blocks, block_bytes, memory=usage.divide(budget, cache)
    )


def set_aside(usage: Usage, num_bytes: int) -> Usage:
    """Returns a usage that counts `num_bytes` of a future allocation as already taken."""
    return replace(usage, available_bytes=usage.available_bytes - num_bytes, other_bytes=usage.other_bytes + num_bytes)


def tighter(first: Usage, second: Usage) -> Usage:
    """Returns the second reading with the smaller free and the larger other memory of both.

    Memory that another process frees between the readings is not counted on.
    """
    available = min(first.available_bytes, second.available_bytes)
    return replace(second, available_bytes=available, other_bytes=max(first.other_bytes, second.other_bytes))


def fixed_plan(
    total_bytes: int, *, block_size: int, block_bytes: int, cache_bytes: int, swap_space_bytes: int
) -> AvailableBlocks:
    """Counts the blocks of pools of given sizes; weights and steps are reported as 0 bytes."""
    usage = Usage(total_bytes, total_bytes, 0, 0, 0)
    num_device_blocks, num_host_blocks = cache_bytes // block_bytes, swap_space_bytes // block_bytes
    memory = usage.divide(cache_bytes, cache_bytes)
    return AvailableBlocks(block_size, num_device_blocks, num_host_blocks, block_bytes, memory=memory)


def fitting_utilization(plan: AvailableBlocks, free_bytes: int, captured_bytes: int) -> float | None:
    """Returns the utilization at which the largest step fits beside the pools; None: it fits already.

    Args:
        plan: the memory plan that the pools were allocated by.
        free_bytes: free memory now that pools and captured steps are allocated.
        captured_bytes: bytes of captured steps, which the plan counts among its activation bytes.
    """
    shortage = plan.memory.activation_bytes - captured_bytes - free_bytes
    if shortage <= 0:
        return None
    return max(0.0, math.floor(1000 * (plan.memory.budget_bytes - shortage) / plan.memory.total_bytes) / 1000)
