"""A worker's place among the workers of its replica. Knows no transport and no weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockyard.errors import Violation
from kernels.leaves import MAX_LEAVES

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Parallel:
    """The sizes of a replica, and the rank of one worker: pipeline rank * tensor_parallel_size + tensor rank."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    rank: int = 0

    @property
    def world_size(self) -> int:
        """Workers of the replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        """The place among those that share this worker's layers."""
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_rank(self) -> int:
        """The place of this worker's stage."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_last_stage(self) -> bool:
        """Whether this worker has the last layers, and so sees what is sampled."""
        return self.pipeline_rank == self.pipeline_parallel_size - 1

    @property
    def is_sampling_rank(self) -> bool:
        """Whether this worker answers what was sampled."""
        return self.is_last_stage and self.tensor_rank == 0


ALONE = Parallel()
# As many stages as any model has layers.
MAX_STAGES = 1024


def wrong_parallel(parallel: Parallel) -> Iterable[Violation]:
    """Finds what no model allows."""
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if not 1 <= tensor <= MAX_LEAVES or tensor & (tensor - 1):
        yield Violation("parallel.tensor_parallel_size", f"must be a power of two, at most {MAX_LEAVES}")
    if not 1 <= pipeline <= MAX_STAGES:
        yield Violation("parallel.pipeline_parallel_size", f"must be from 1 to {MAX_STAGES}")
    if parallel.rank >= max(1, parallel.world_size):
        yield Violation("parallel.rank", f"must be below {parallel.world_size}, the number of workers")
