"""Finds out whether this machine has GPUs, and how many, without a library of theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from blockyard.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blockyard.configuration import DeviceSettings
    from blockyard.contract.parallel import ParallelSizes

DEVICES = Path("/dev")


def uses_gpu(device: DeviceSettings) -> bool:
    """Whether the workers of this machine will compute on a GPU."""
    return device.device == "cuda" or (device.device == "auto" and (DEVICES / "nvidiactl").exists())


def count_gpus(environment: Mapping[str, str]) -> int:
    """Counts the GPUs that CUDA offers to a process with this environment."""
    if (visible := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip()])
    return len(list(DEVICES.glob("nvidia[0-9]*")))


def check_num_gpus(device: DeviceSettings, parallel: ParallelSizes) -> None:
    """Raises SettingsError if a replica needs more GPUs than there are: NCCL needs one GPU per worker."""
    if uses_gpu(device) and 1 < parallel.world_size > (num_gpus := count_gpus(os.environ)):
        raise SettingsError(
            f"a replica of {parallel.world_size} workers needs as many GPUs, and there are {num_gpus} here:"
            " choose a smaller --tensor-parallel-size, or --device cpu"
        )
