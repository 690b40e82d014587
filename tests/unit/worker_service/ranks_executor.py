"""The executors of all ranks of a replica as one, each rank in a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from blockyard.contract.parallel import Parallel
from tests.kit.kernels.thread_collectives import ThreadMeeting
from worker_service.collectives.group import GroupLifetime, RankGroup
from worker_service.steps.rank_steps import RankSteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.step import Step, StepOutput
    from worker_service.steps.step_executor import StepExecutor


class RanksExecutor:
    """Sends each step to every rank, and returns the sampling rank's answer once all agree: as a scheduler does."""

    def __init__(
        self, make_rank: Callable[[Parallel, RankSteps], StepExecutor], tensor_size: int, pipeline_size: int = 1
    ) -> None:
        """`make_rank`: makes the executor of a rank, with what joins it to the others."""
        world = ThreadMeeting(tensor_size * pipeline_size)
        stages = [ThreadMeeting(tensor_size) for _ in range(pipeline_size)] if pipeline_size > 1 else [world]
        self._meetings = {world, *stages}
        self._pool = ThreadPoolExecutor(world.size)
        self.ranks: list[StepExecutor] = []
        places = [collectives for stage in stages for collectives in stage.make_collectives()]
        for rank, (everybody, neighbours) in enumerate(zip(world.make_collectives(), places, strict=True)):
            parallel = Parallel(tensor_size, pipeline_size, rank)
            group = RankGroup(everybody, neighbours, GroupLifetime(rank))
            self.ranks.append(make_rank(parallel, RankSteps(parallel, lambda _epoch, group=group: group)))
            if parallel.is_sampling_rank:
                self._sampling_rank = rank

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch at every rank."""
        for rank in self.ranks:
            rank.begin_epoch(epoch)

    def execute(self, step: Step, arrival: float) -> StepOutput:
        """Executes a step at every rank at once."""

        def one(rank: StepExecutor) -> StepOutput:
            torch.set_num_threads(1)
            result = rank.execute(step, arrival)
            if result.refusal is not None:
                for meeting in self._meetings:
                    meeting.abort(str(result.refusal))
            return result

        results = list(self._pool.map(one, self.ranks))
        assert len({result.digests[0] for result in results}) == 1, "the ranks do not agree"
        assert len({result.digests[1] for result in results if result.digests[1]}) == 1, "the last stage does not agree"
        return results[self._sampling_rank]
