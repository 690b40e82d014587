"""Selects the backend of a device.

Knows which backends there are, and imports one only when it is asked for. Knows no ops.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kernels.ops import Backend

CPU_KERNELS = ("auto", "amx", "avx512_bf16", "avx512", "avx2", "reference")
"""The choice of kernels on a CPU: what a table names for the processor, those of one instruction set, or torch's."""


QUANTIZATIONS = ("none", "int8")
"""How the weights of all products are held: in the model's dtype, or as `kernels.reference.int8` defines."""


@cache
def get_backend(
    device: torch.device, dtype: torch.dtype, cpu_kernels: str = "auto", quantization: str = "none"
) -> Backend:
    """Returns the backend of a device, the same object each time.

    Args:
        device: where to compute.
        dtype: in what; the CPU's own kernels know float32 and bfloat16.
        cpu_kernels: one of CPU_KERNELS, for a device that is a CPU.
        quantization: one of QUANTIZATIONS; the CPU's own kernels alone know any.

    Raises:
        ValueError: there is no backend for this kind of device, or none of what was asked for.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no backend for device {device.type!r}; known are cpu and cuda")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"no quantization {quantization!r}; known are {', '.join(QUANTIZATIONS)}")
    if device.type == "cpu" and cpu_kernels != "reference":
        from kernels.cpu.backend import choose_backend  # noqa: PLC0415  the choice of backend

        if (chosen := choose_backend(dtype, cpu_kernels, quantization)) is not None:
            return chosen
    if quantization != "none":
        raise ValueError(
            f"{quantization} needs the kernels for x86-64 processors, built (make setup), and a model in bfloat16 or "
            f"float32; this is {str(dtype).removeprefix('torch.')} on {device.type}, kernels: {cpu_kernels}"
        )
    from kernels.reference.backend import ReferenceBackend  # noqa: PLC0415  the choice of backend

    return ReferenceBackend(device)
