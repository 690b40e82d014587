"""Chooses the device, and checks what dtypes it can compute in. Knows torch's view of the hardware, and no models."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from blockyard.capacity.devices import check_gpu_dtype, choose_device_type
from blockyard.contract.workers import Dtype
from blockyard.errors import Violation, invalid


@dataclass(frozen=True, slots=True)
class AllowedDevice:
    """The devices that a scheduler may choose, by the worker's start options: `kind` is "auto", "cpu" or "cuda".

    `index`: the GPU among those that this process sees. `cache_bytes`: bytes of all blocks; 0: as many as fit.
    """

    kind: str = "auto"
    index: int = 0
    cache_bytes: int = 0


ANY_DEVICE = AllowedDevice()


def choose_device(requested: str, allowed: AllowedDevice) -> torch.device:
    """Chooses a device, and makes a GPU the current device of this thread, since Triton launches kernels there.

    Args:
        requested: the scheduler's choice: "auto", "cpu" or "cuda".
        allowed: the devices that this worker's start options allow.

    Raises:
        BlockyardError: FIELD_INVALID, if the choice is not allowed or the GPU does not exist.
    """
    wanted = choose_device_type(requested, allowed.kind, has_gpu=torch.cuda.is_available())
    if wanted == "cpu":
        return torch.device("cpu")
    if allowed.index >= (num_gpus := torch.cuda.device_count()):
        reason = f"torch sees {num_gpus} GPUs here, and this worker was started with --worker-device-index"
        raise invalid([Violation("device_type", f"{reason} {allowed.index}")])
    torch.cuda.set_device(allowed.index)
    return torch.device("cuda", allowed.index)


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {_processor()}"


def instruction_set(device: torch.device) -> str:
    """Returns the model of a GPU, or the processor's vector instruction set."""
    return describe_device(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()


def torch_dtype(dtype: Dtype) -> torch.dtype | None:
    """Returns torch's name for a dtype; None: the model's own."""
    return None if dtype is Dtype.UNSPECIFIED else getattr(torch, dtype.value)


def check_dtype(dtype: torch.dtype | None, device: torch.device) -> None:
    """Refuses a dtype that a GPU cannot compute in; None: not known yet.

    Raises:
        BlockyardError: FIELD_INVALID, with the GPU's name and what to use instead.
    """
    if device.type == "cuda" and dtype is not None:
        name = str(dtype).removeprefix("torch.")
        check_gpu_dtype(name, describe_device(device), torch.cuda.get_device_capability(device))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
