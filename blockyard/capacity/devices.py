"""Chooses the kind of device and checks its dtypes. Without torch: callers pass in what the machine has."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from blockyard.errors import Violation, invalid

# bfloat16 arithmetic came with Ampere.
BFLOAT16_CAPABILITY = (8, 0)


def choose_device_type(requested: str, allowed: str, *, has_gpu: bool) -> str:
    """Chooses cpu or cuda from the scheduler's `requested` and the worker's `allowed` device; both may be auto.

    Raises:
        BlockyardError: FIELD_INVALID, if the two contradict each other or there is no GPU.
    """
    if "auto" not in (requested, allowed) and requested != allowed:
        raise invalid(
            [Violation("device_type", f"is {requested}, and this worker was started with --worker-device {allowed}")]
        )
    wanted = allowed if requested == "auto" else requested
    if wanted == "auto":
        return "cuda" if has_gpu else "cpu"
    if wanted == "cuda" and not has_gpu:
        raise invalid(
            [Violation("device_type", "is cuda, and torch sees no GPU here: use cpu, or a CUDA build of torch")]
        )
    return wanted


def check_gpu_dtype(dtype_name: str, name: str, capability: tuple[int, int]) -> None:
    """Refuses a dtype that the GPU cannot compute in. `name`: of the GPU, for the message.

    Raises:
        BlockyardError: FIELD_INVALID, with what to use instead.
    """
    if dtype_name == "bfloat16" and capability < BFLOAT16_CAPABILITY:
        reason = f"{name} has compute capability {capability[0]}.{capability[1]}"
        raise invalid([Violation("dtype", f"bfloat16 needs a GPU of capability 8.0 or more; {reason}: use float16")])


def has_avx512() -> bool:
    """Returns whether the processor has AVX512; the layout of weights depends on it. True if unknown."""
    flags = _processor_flags()
    return not flags or {"avx512f", "avx512bw", "avx512vl", "avx512dq"} <= flags


def multiplies(dtype_name: str) -> bool:
    """Returns whether torch multiplies a dtype on this processor; else it holds and multiplies float32."""
    if dtype_name == "bfloat16":
        return has_avx512()
    return dtype_name == "float32" or "avx512_fp16" in _processor_flags()


@cache
def _processor_flags() -> frozenset[str]:
    """Returns what /proc/cpuinfo lists; empty if unknown."""
    if platform.machine() != "x86_64" or not (facts := Path("/proc/cpuinfo")).exists():
        return frozenset()
    lines = facts.read_text(errors="replace").splitlines()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())
