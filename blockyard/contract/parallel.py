"""How the workers of a replica share a model: the parallel sizes, and a worker's rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """The number of workers that share each layer, and the number of pipeline stages."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_virtual_engines(self) -> int:
        """The number of steps that the decodes are split into; with a pipeline stages + 1, to hide the transfers."""
        return self.pipeline_parallel_size + 1 if self.pipeline_parallel_size > 1 else 1


@dataclass(frozen=True, slots=True)
class Parallel(ParallelSizes):
    """The place of one worker in its replica: `rank` = pipeline rank * tensor_parallel_size + tensor rank."""

    rank: int = 0

    @property
    def tensor_rank(self) -> int:
        """The worker's rank among the workers that share its layers."""
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_rank(self) -> int:
        """The index of the worker's pipeline stage."""
        return self.rank // self.tensor_parallel_size

    @property
    def is_last_stage(self) -> bool:
        """Whether this worker has the last layers, and so the logits."""
        return self.pipeline_rank == self.pipeline_parallel_size - 1

    @property
    def is_sampling_rank(self) -> bool:
        """Whether this worker returns the sampled tokens."""
        return self.is_last_stage and self.tensor_rank == 0


ALONE = Parallel()
