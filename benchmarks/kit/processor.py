"""The processor that a benchmark runs on: its name, its instructions, and the kernels that a worker takes there."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from kernels.cpu.processors import chosen_instruction_sets

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


def name() -> str:
    """Returns the processor's name with its family and model, where Linux tells them: names alone are often cut."""
    facts = _facts()
    if "model name" not in facts:
        return platform.processor()
    return f"{facts['model name']} (family {facts.get('cpu family', '?')}, model {facts.get('model', '?')})"


def flags() -> tuple[str, ...]:
    """Returns those of FLAGS that this processor has."""
    has = set(_facts().get("flags", "").split())
    return tuple(flag for flag in FLAGS if flag in has)


def instruction_set(cpu_kernels: str = "auto") -> str:
    """Returns the instruction set that `--cpu-kernels` takes here; "reference" where torch computes."""
    return next(iter(chosen_instruction_sets()), "reference") if cpu_kernels == "auto" else cpu_kernels


@cache
def _facts() -> dict[str, str]:
    """Reads what Linux tells of the first processor."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}
