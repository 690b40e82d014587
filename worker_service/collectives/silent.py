"""Collectives that send nothing, for profiles, probes and warm-ups: if one rank fails there, no other rank waits.

They use as much memory as real collectives. A world of one rank needs no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.collectives import Ranks
from worker_service.collectives.gathering import GatheringCollectives

if TYPE_CHECKING:
    from torch import Tensor

    from blockyard.contract.parallel import Parallel


class SilentCollectives(GatheringCollectives):
    """Uses this rank's rows in place of every rank's rows."""

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
        """Receives zeros."""
        rows.zero_()

    def abort(self, reason: str) -> None:
        """Does nothing: no rank waits."""


def make_silence(parallel: Parallel) -> Ranks:
    """Makes silent collectives for this rank's place."""
    return Ranks(
        SilentCollectives(parallel.rank, parallel.world_size),
        SilentCollectives(parallel.tensor_rank, parallel.tensor_parallel_size),
    )
