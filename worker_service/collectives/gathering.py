"""The collectives that all transports share. They need two operations of a transport: all-gather and broadcast.

Each rank adds the gathered rows itself in the order of the tree (`kernels.leaves`), since a library's all-reduce has
neither this order nor a fixed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from blockyard_kernels.collectives import Ranks
from blockyard_kernels.shapes import add_leaves

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from blockyard.contract.parallel import Parallel


_BITS = {2: torch.int16, 4: torch.int32}


class GatheringCollectives(ABC):
    """`blockyard_kernels.collectives.Collectives`, except for the operations that each transport implements."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def _all_gather(self, rows: Tensor) -> Tensor:
        """Returns the rows of all ranks, in rank order: [size, *rows.shape]."""
        ...

    @abstractmethod
    def _broadcast(self, rows: Tensor, root: int) -> None:
        """Fills `rows` with the rows of rank `root`."""

    def _gather(self, rows: Tensor, to: int) -> Tensor | None:
        """Like `_all_gather`, for one rank."""
        gathered = self._all_gather(rows)
        return gathered if self.rank == to else None

    def _to_device(self, array: npt.NDArray[np.int32]) -> Tensor:
        """Copies a host array into memory that the transport can send; it never aliases the array."""
        return torch.from_numpy(array.copy())

    def add(self, rows: Tensor) -> None:
        if self.size > 1:
            rows.copy_(add_leaves(list(self._all_gather(rows))))

    def add_bits(self, rows: Tensor) -> None:
        if self.size > 1:
            bits = rows.view(_BITS[rows.element_size()])
            bits.copy_(self._all_gather(bits).sum(0, dtype=bits.dtype))

    def gather(self, rows: Tensor, to: int = 0) -> Tensor | None:
        if self.size == 1:
            return rows
        gathered = self._gather(rows, to)
        return None if gathered is None else gathered.transpose(0, 1).reshape(len(rows), self.size * rows.shape[1])

    def exchange_best(
        self, values: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], finite: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        if self.size == 1:
            return ids, finite
        mine = np.stack([values.view(np.int32), ids.astype(np.int32), finite.astype(np.int32)])
        all_ranks = self._all_gather(self._to_device(mine)).cpu().numpy()
        best_values, best_ids = all_ranks[0, 0].view(np.float32), all_ranks[0, 1]
        for its_bits, its_ids, _ in all_ranks[1:]:
            its_values = its_bits.view(np.float32)
            is_better = (its_values > best_values) | ((its_values == best_values) & (its_ids < best_ids))
            best_values = np.where(is_better, its_values, best_values)
            best_ids = np.where(is_better, its_ids, best_ids)
        return best_ids.astype(np.int64), np.all(all_ranks[:, 2] != 0, axis=0)

    def broadcast(self, array: npt.NDArray[np.int32], root: int = 0) -> npt.NDArray[np.int32]:
        if self.size == 1:
            return array
        rows = self._to_device(array)
        self._broadcast(rows, root)
        return rows.cpu().numpy()


class SilentCollectives(GatheringCollectives):
    """Uses this rank's rows in place of every rank's rows, for profiles, probes and warm-ups.

    If one rank fails there, no other rank waits. They use as much memory as real collectives.
    """

    is_broken = False

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(rank, size)

    def _all_gather(self, rows: Tensor) -> Tensor:
        return rows.expand(self.size, *rows.shape).clone()

    def _broadcast(self, rows: Tensor, root: int) -> None:
        pass

    def send(self, rows: Tensor, rank: int) -> None:
        """Sends nothing."""

    def receive(self, rows: Tensor, rank: int) -> None:
        rows.zero_()

    def abort(self, reason: str) -> None:
        """Does nothing: no rank waits."""


def make_silence(parallel: Parallel) -> Ranks:
    """Makes silent collectives for this rank's place."""
    return Ranks(
        SilentCollectives(parallel.rank, parallel.world_size),
        SilentCollectives(parallel.tensor_rank, parallel.tensor_parallel_size),
    )
