"""Checks this machine: memory, limits, clock, GPUs and the compilers that kernels need."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.capacity.memory import ControlGroups, read_host_memory, read_text
from blockyard.cli import units
from blockyard.cli.doctor.findings import bad, doubtful, good
from blockyard.grammars.limits import HINT, library_version
from blockyard.local.gpus import uses_gpu
from blockyard.local.hardware import query_gpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blockyard.cli.doctor.findings import Finding
    from blockyard.configuration import SystemConfiguration

LEAST_MEMORY_BYTES = 2 << 30
# Files that a process opens beside its connections.
OTHER_FILES = 256
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# adjtimex's result while the clock is not synchronized, and bytes enough for its structure.
CLOCK_ERROR, TIMEX_BYTES = 5, 512


def look_at_machine(configuration: SystemConfiguration) -> Iterator[Finding]:
    """Runs the checks that need no other process."""
    yield good("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    groups = ControlGroups()
    yield look_at_memory(groups)
    yield look_at_processors(groups)
    yield look_at_huge_pages(read_text(HUGE_PAGES))
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    yield look_at_files(most, configuration.security.max_connections)
    yield look_at_clock(_read_clock())
    yield from look_at_gpus(configuration)
    yield look_at_grammars(library_version())


def look_at_grammars(version: str) -> Finding:
    """Checks that structured outputs are possible. `version`: llguidance's; empty: it is not installed."""
    if version:
        return good("grammars", f"llguidance {version}")
    return doubtful("grammars", "llguidance is not installed: no answers of a given form", HINT)


def look_at_memory(groups: ControlGroups) -> Finding:
    """Checks the free memory, in a container what its limit leaves."""
    host = read_host_memory(groups)
    limit = " (a control group's limit)" if groups.memory() else ""
    text = f"{units.size(host.available_bytes)} free of {units.size(host.total_bytes)}{limit}"
    if host.available_bytes < LEAST_MEMORY_BYTES:
        return doubtful("memory", text, "free some, or raise the limit: `blockyard plan` says what a model takes")
    return good("memory", text)


def look_at_processors(groups: ControlGroups) -> Finding:
    """Counts the processors that this process may use, after affinity and quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = groups.num_cpus()
    if quota is not None and quota < usable:
        return good("processors", f"{quota} of {usable}, by a control group's quota")
    return good("processors", str(usable))


def look_at_huge_pages(modes: str) -> Finding:
    """Checks that a process can get huge pages. `modes`: the system's choices, the active one in []."""
    if "[never]" not in modes:
        return good("huge pages", "given to who asks" if modes else "not told by this system")
    advice = f"echo madvise > {HUGE_PAGES}: a CPU's steps wait less for memory"
    return doubtful("huge pages", "never given", advice)


def look_at_files(most: int, max_connections: int) -> Finding:
    """Checks that the open-file limit `most` allows for `max_connections` connections."""
    needed = max_connections + OTHER_FILES
    text = "no limit" if most == resource.RLIM_INFINITY else f"{most} at once"
    if most != resource.RLIM_INFINITY and most < needed:
        advice = f"raise the hard limit (ulimit -Hn) to {needed}, or lower --max-connections"
        return doubtful("open files", text, advice)
    return good("open files", text)


def _read_clock() -> int | None:
    """Returns adjtimex's state of the clock; None if the system has no such call."""
    try:
        return ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    except (OSError, AttributeError):
        return None


def look_at_clock(state: int | None) -> Finding:
    """Checks that the clock is synchronized: certificates and keys expire by it. `state`: adjtimex's result."""
    if state == CLOCK_ERROR:
        return doubtful("clock", "nothing keeps it right", "run chrony or systemd-timesyncd, here or on the host")
    return good("clock", "not told by this system" if state is None or state < 0 else "kept right")


def look_at_gpus(configuration: SystemConfiguration) -> Iterator[Finding]:
    found = query_gpus()
    for number, gpu in enumerate(found):
        capability = ".".join(map(str, gpu.capability))
        text = f"{gpu.name}, {units.size(gpu.available_bytes)} free of {units.size(gpu.total_bytes)}"
        yield good(f"GPU {number}", f"{text}, capability {capability}")
    if not uses_gpu(configuration.device):
        if not found:
            yield good("GPU", "none: workers compute on the processors")
        return
    if not found:
        advice = "install NVIDIA's driver, give the container its GPUs, or choose --device cpu"
        yield bad("GPU", "nvidia-smi lists none", advice)
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield bad("C compiler", "none", "install gcc: Triton compiles the kernels' launchers with it")
