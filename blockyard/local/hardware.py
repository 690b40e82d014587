"""Describes the hardware to compute on: this machine's memory and GPUs, or a GPU given by name.

Asks the system and NVIDIA's driver; does not import torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.capacity.memory import ControlGroups, read_host_memory
from blockyard.capacity.replica_plan import Hardware
from blockyard.local.gpus import count_gpus, uses_gpu
from blockyard.settings import SettingsError

if TYPE_CHECKING:
    from blockyard.configuration import DeviceSettings

GIB = 2**30
_UNITS = {"": GIB, "gib": GIB, "g": GIB, "gb": 10**9, "mib": 2**20, "m": 2**20, "mb": 10**6, "tib": 2**40}
# For each GPU the driver's name, its memory in GiB, rounded down, and its compute capability.
NAMED_GPUS = {
    "t4": ("Tesla T4", 14.5, (7, 5)),
    "v100": ("V100", 31.7, (7, 0)),
    "a10": ("A10", 22.0, (8, 6)),
    "a100-40gb": ("A100 40GB", 39.3, (8, 0)),
    "a100-80gb": ("A100 80GB", 79.1, (8, 0)),
    "l4": ("L4", 22.0, (8, 9)),
    "l40s": ("L40S", 44.4, (8, 9)),
    "h100": ("H100", 79.1, (9, 0)),
    "h200": ("H200", 139.7, (9, 0)),
}
# More GPUs than any replica has workers: named GPUs are assumed to be enough.
ENOUGH = 2**16
_QUERY = ("--query-gpu=name,memory.total,memory.free,compute_cap", "--format=csv,noheader,nounits")


def read_size(text: str) -> int:
    """Reads a size as 24GiB, 24 (GiB) or 512MiB, in bytes. Raises SettingsError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS or not float(match[1]):
        raise SettingsError(f"--memory {text} is not a size: give one like 24GiB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2]])


def find_hardware(device: DeviceSettings, memory: str = "", gpu: str = "") -> Hardware:
    """Returns the hardware that workers would compute on.

    Args:
        device: whether to use this machine's GPUs.
        memory: a memory size that replaces this machine's (with GPUs: that of each GPU); empty: no change.
        gpu: one of NAMED_GPUS instead of this machine's devices; empty: this machine's.

    Raises:
        SettingsError: the memory size is malformed, or the GPU is not known.
    """
    if gpu:
        hardware = _named_gpu(gpu)
    elif device.device == "cuda" and memory:
        hardware = replace(_named_gpu("h100"), name="a GPU")
    else:
        hardware = (_read_gpus() if uses_gpu(device) else None) or read_processors()
    if not memory:
        return hardware
    size = read_size(memory)
    return replace(hardware, total_bytes=size, available_bytes=size)


def _named_gpu(name: str) -> Hardware:
    known = NAMED_GPUS.get(name.lower())
    if known is None:
        raise SettingsError(
            f"--gpu must be one of {', '.join(NAMED_GPUS)}, not {name}: for others give --device cuda --memory SIZE"
        )
    return Hardware(known[0], int(known[1] * GIB), int(known[1] * GIB), ENOUGH, known[2])


def read_processors() -> Hardware:
    """Reads this machine's memory, or its container's, and its processors."""
    groups = ControlGroups()
    host = read_host_memory(groups)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_threads = min(usable, groups.num_cpus() or usable)
    return Hardware(f"{num_threads} processors", host.total_bytes, host.available_bytes, 0, num_threads=num_threads)


def _read_gpus() -> Hardware | None:
    """Returns the GPU with the least memory, with the number of GPUs; None: no GPU or no driver."""
    found = query_gpus()
    if not found:
        return None
    least = min(found, key=lambda gpu: gpu.total_bytes)
    return replace(least, num_devices=count_gpus(os.environ) or len(found))


def query_gpus() -> list[Hardware]:
    """Asks nvidia-smi for every GPU; empty if there is no GPU or no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, *_QUERY], capture_output=True, text=True, check=False, timeout=30)
    return [] if done.returncode else [_read_gpu(line) for line in done.stdout.splitlines() if line.count(",") == 3]


def _read_gpu(line: str) -> Hardware:
    name, total, free, capability = (part.strip() for part in line.split(","))
    major, _, minor = capability.partition(".")
    return Hardware(name, int(total) << 20, int(free) << 20, 1, (int(major), int(minor)))
