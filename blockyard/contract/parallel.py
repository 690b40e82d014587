"""How the workers of a replica share a model: the sizes, and the place of one of them. Knows no transport."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """The workers that share each layer, and the stages, each of which has a run of the layers."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_virtual_engines(self) -> int:
        """The steps that share the decodes: with several stages one more than these, which hides the way between."""
        return self.pipeline_parallel_size + 1 if self.pipeline_parallel_size > 1 else 1


@dataclass(frozen=True, slots=True)
class Parallel(ParallelSizes):
    """The place of one worker in its replica: `rank` = pipeline rank * tensor_parallel_size + tensor rank."""

    rank: int = 0

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
