"""The processor that a benchmark runs on: its name, its instructions, and the kernels that a worker takes there."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from blockyard_kernels.cpu.processors import chosen_instruction_sets, this_processor

# Those of /proc/cpuinfo that rates depend on.
FLAGS = (
    "fma",
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
)


@cache
def name() -> str:
    """Returns the processor's name with its family and model, where Linux lists them: names alone are often cut."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in first.splitlines())
    facts = {key.strip(): value.strip() for key, _, value in lines}
    return f"{facts.get('model name', '?')} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def flags() -> tuple[str, ...]:
    """Returns those of FLAGS that this processor has."""
    return tuple(flag for flag in FLAGS if flag in this_processor().features)


def instruction_set(cpu_kernels: str = "auto") -> str:
    """Returns the instruction set that `--cpu-kernels` takes here; "reference" where torch computes."""
    return next(iter(chosen_instruction_sets()), "reference") if cpu_kernels == "auto" else cpu_kernels
