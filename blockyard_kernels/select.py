"""Selects the backend of a device.

Knows which backends there are, and imports one only when it is asked for. Knows no ops.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from blockyard_kernels.arena import Arena, LastingArena

if TYPE_CHECKING:
    import torch

    from blockyard_kernels.ops import Backend

log = logging.getLogger(__name__)

GPU_KERNELS = ("auto", "triton", "reference")
"""The kernels on a GPU: "auto" takes the Triton kernels if they pass their self-test, else torch's ops (reference)."""

CPU_KERNELS = ("auto", "amx", "avx512_bf16", "avx512", "avx2", "reference")
"""The kernels on a CPU: "auto" takes the instruction set that `cpu.processors` names; "reference" is torch."""


QUANTIZATIONS = ("none", "int8", "fp8")
"""The format of all linear weights: the model's dtype, or 8 bits as `reference.int8` and `reference.fp8` define."""
CPU_QUANTIZATIONS = ("none", "int8")


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The start options of a worker about kernels, for any device."""

    cpu: str = "auto"
    """One of CPU_KERNELS."""
    gpu: str = "auto"
    """One of GPU_KERNELS."""
    batch_invariant: bool = False
    """Whether a GPU shall give a row the same bits in every step."""

    def name_for(self, device: torch.device) -> str:
        return self.gpu if device.type == "cuda" else self.cpu


@cache
def get_backend(
    device: torch.device,
    dtype: torch.dtype,
    kernels: str = "auto",
    quantization: str = "none",
    *,
    batch_invariant: bool = False,
) -> Backend:
    """Returns the backend of a device, the same object each time.

    Args:
        device: the device to compute on.
        dtype: the model's dtype; the CPU kernels support float32 and bfloat16.
        kernels: one of CPU_KERNELS for a CPU, of GPU_KERNELS for a GPU.
        quantization: one of QUANTIZATIONS.
        batch_invariant: whether a GPU shall give a row the same bits in every step. The CPU's kernels always do.

    Raises:
        ValueError: there is no backend for this type of device, or none with these kernels and this quantization.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no backend for device {device.type!r}; known are cpu and cuda")
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"no quantization {quantization!r}; known are {', '.join(QUANTIZATIONS)}")
    if device.type == "cpu" and kernels != "reference" and quantization in CPU_QUANTIZATIONS:
        from blockyard_kernels.cpu.backend import choose_backend  # noqa: PLC0415  the choice of backend

        if (chosen := choose_backend(dtype, kernels, quantization)) is not None:
            return chosen
    if device.type == "cuda" and kernels != "reference":
        compiled = _compile(device, kernels, quantization, batch_invariant=batch_invariant)
        if compiled is not None and (kernels != "auto" or _computes(compiled, dtype, quantization)):
            return compiled
    if quantization != "none":
        needed = (
            ""
            if quantization not in CPU_QUANTIZATIONS
            else ("the kernels for x86-64 processors, built (make setup), and a model in bfloat16 or float32, or ")
        )
        raise ValueError(
            f"{quantization} needs {needed}a GPU with our kernels; "
            f"this is {str(dtype).removeprefix('torch.')} on {device.type}, kernels: {kernels}"
        )
    from blockyard_kernels.reference.backend import ReferenceBackend  # noqa: PLC0415  the choice of backend

    return ReferenceBackend(device)


def make_arena(device: torch.device, *, can_be_given_up: bool = False) -> Arena:
    """Makes an empty arena. In host memory it can always be given up; on a GPU only with `can_be_given_up`."""
    if device.type == "cpu":
        from blockyard_kernels.cpu.huge_pages import HostArena  # noqa: PLC0415  the choice of backend

        return HostArena()
    if can_be_given_up:
        from blockyard_kernels.cuda_arena import CudaArena  # noqa: PLC0415  the choice of backend

        return CudaArena(device)
    return LastingArena(device)


def _compile(device: torch.device, kernels: str, quantization: str, *, batch_invariant: bool) -> Backend | None:
    """Makes the Triton backend of a GPU. Returns None if Triton cannot be imported and `kernels` is "auto"."""
    try:
        from blockyard_kernels.cuda.backend import CudaBackend  # noqa: PLC0415  the choice of backend
    except ImportError as error:
        if kernels != "auto":
            raise ValueError(f"no {kernels} kernels: {error}") from None
        log.warning("no kernels for GPUs (%s): torch's ops serve, which are slower", error)
        return None
    return CudaBackend(device, invariant=batch_invariant, quantization=quantization)


def _computes(compiled: Backend, dtype: torch.dtype, quantization: str) -> bool:
    """Returns whether the compiled kernels give the results of torch's ops; logs the first difference."""
    from blockyard_kernels.cuda.self_test import first_difference  # noqa: PLC0415  the choice of backend
    from blockyard_kernels.reference.backend import ReferenceBackend  # noqa: PLC0415  the choice of backend
    from blockyard_kernels.reference.fp8 import linear_fp8  # noqa: PLC0415  the choice of backend
    from blockyard_kernels.reference.int8 import linear_int8  # noqa: PLC0415  the choice of backend

    product = {"int8": linear_int8, "fp8": linear_fp8}.get(quantization)
    try:
        wrong = first_difference(compiled, ReferenceBackend(compiled.device), dtype, product)
    except Exception as error:  # noqa: BLE001 - a compiler's may be any
        wrong = f"{type(error).__name__}: {error}"
    if wrong:
        log.warning("the kernels for GPUs fail their self-test (%s): torch's ops serve, which are slower", wrong)
    return not wrong
