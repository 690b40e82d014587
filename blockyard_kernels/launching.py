"""Asynchronous work on a device: work is launched in order and awaited later. Knows no ops.

A host that waits for each step before it prepares the next one leaves the device idle in between. With a launcher whose
depth is above 1, a step is launched while the previous one still runs. The tokens of the previous step, which the host
does not know yet, stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    from torch import Tensor

    Results = tuple[Tensor, ...]

# One step runs while another one waits behind it.
GPU_DEPTH = 2


def upload(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copies a numpy array to a device without waiting for it. On a CPU the tensor may share the array's memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # From memory that is not pinned, torch would wait for the copy, and so for all work launched before it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def take_last_tokens(token_ids: Tensor, last_tokens: Tensor) -> Tensor:
    """See `blockyard_kernels.sampling.SamplingOps`; implemented with torch's ops."""
    return torch.where(token_ids < 0, last_tokens[(-1 - token_ids).clamp(min=0)], token_ids).clamp(min=0)


def put_last_tokens(last_tokens: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """See `blockyard_kernels.sampling.SamplingOps`; implemented with torch's ops."""
    last_tokens[rows] = token_ids


class Launched(Protocol):
    @property
    def is_ready(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self) -> Results:
        """Waits until the work is done and returns its results on the host, or raises the work's exception.

        May be called from any thread, and more than once.
        """
        ...


class Launcher(Protocol):
    """Launches the work of one device, from one thread."""

    @property
    def depth(self) -> int:
        """The most steps that may be launched and unfinished; 1: `launch` returns when the work is done."""
        ...

    def launch(self, work: Callable[[], Results]) -> Launched:
        """Launches work that runs after all work launched before.

        Args:
            work: a function that returns tensors on the device. It runs at any time before `wait` returns; the host
                arrays that it reads must not change until then.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Done:
    results: Results
    is_ready = True

    def wait(self) -> Results:
        return self.results


class Immediate:
    """The launcher of a device that computes in the calling thread."""

    depth = 1

    def launch(self, work: Callable[[], Results]) -> Launched:
        return _Done(work())


IMMEDIATE = Immediate()


@dataclass(frozen=True, slots=True, eq=False)
class _Enqueued:
    results: Results
    is_done: torch.cuda.Event

    @property
    def is_ready(self) -> bool:
        return self.is_done.query()

    def wait(self) -> Results:
        # Releases the GIL, and sleeps instead of spinning.
        self.is_done.synchronize()
        return self.results


class CudaLauncher:
    """The launcher of a GPU: work is enqueued on a CUDA stream without waiting, so that the host runs ahead.

    Each result is copied to pinned host memory after the work, and an event after the copy tells when it has arrived.
    PyTorch reuses pinned memory only when the copies that use it are done.
    """

    depth = GPU_DEPTH

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def launch(self, work: Callable[[], Results]) -> _Enqueued:
        """Enqueues work on the device's current stream."""
        results = tuple(map(_copy_to_host, work()))
        is_done = torch.cuda.Event(blocking=True)
        is_done.record(torch.cuda.current_stream(self._device))
        return _Enqueued(results, is_done)


def _copy_to_host(result: Tensor) -> Tensor:
    host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    return host.copy_(result, non_blocking=True)
