"""A network cut among ranks that are threads of this process: each with a backend, a pool and a share of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from blockyard.contract.parallel import Parallel
from blockyard_kernels.collectives import Ranks as JoinedRanks
from blockyard_kernels.cpu.backend import CpuBackend
from blockyard_kernels.reference.backend import ReferenceBackend
from tests.kit.kernels.backends import CPU, Kernels, build_kernels
from tests.kit.kernels.step_runner import StepRunner
from tests.kit.kernels.thread_collectives import ThreadMeeting

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from blockyard_kernels.ops import Backend


class Ranks:
    """The runners of all ranks, which do the same things at once."""

    def __init__(self, folder: Path, kernels: Kernels, size: int, quantization: str = "none") -> None:
        build_kernels()
        self._pool = ThreadPoolExecutor(size)
        self._meeting = ThreadMeeting(size)
        self.runners: list[StepRunner] = []
        for rank, collectives in enumerate(self._meeting.make_collectives()):
            backend = new_backend(kernels, quantization)
            backend.join(JoinedRanks(collectives, collectives))
            parallel = Parallel(tensor_parallel_size=size, rank=rank)
            self.runners.append(StepRunner.load(folder, kernels.dtype, backend, parallel=parallel))

    def together(self, call: Callable[[StepRunner], Tensor]) -> list[Tensor]:
        """Calls with each rank's runner at the same time, and returns the results in rank order."""

        def one(runner: StepRunner) -> Tensor:
            torch.set_num_threads(1)
            try:
                return call(runner)
            except BaseException as error:
                self._meeting.abort(str(error))
                raise

        return list(self._pool.map(one, self.runners))

    def logits(self, token_ids: Sequence[int], pieces: Sequence[int]) -> Tensor:
        """Computes a sequence in pieces -> all its logits over the whole vocabulary."""
        return torch.cat(self.together(lambda runner: runner.run(object(), token_ids, pieces)), dim=1)


def new_backend(kernels: Kernels, quantization: str = "none") -> Backend:
    """Makes a backend that nobody else has, of one thread."""
    available = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return ReferenceBackend(CPU) if kernels.is_reference else CpuBackend(kernels.dtype, kernels.name, quantization)
    finally:
        torch.set_num_threads(available)
