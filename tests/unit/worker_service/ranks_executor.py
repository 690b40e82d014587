"""The executors of all ranks of a replica as one, each rank in a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from worker_service.collectives.group import Group
from worker_service.collectives.lifetime import GroupLifetime
from worker_service.collectives.threads import ThreadMeeting
from worker_service.parallel import Parallel
from worker_service.steps.rank_steps import RankSteps

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.step import Step, StepResult
    from worker_service.steps.step_executor import StepExecutor


class RanksExecutor:
    """Sends each step to every rank, and returns the sampling rank's answer once all agree: as a scheduler does."""

    def __init__(self, size: int, make_rank: Callable[[Parallel, RankSteps], StepExecutor]) -> None:
        """`make_rank`: makes the executor of a rank, with what joins it to the others."""
        self._meeting = ThreadMeeting(size)
        self._pool = ThreadPoolExecutor(size)
        self.ranks: list[StepExecutor] = []
        for rank, collectives in enumerate(self._meeting.make_collectives()):
            parallel = Parallel(size, 1, rank)
            group = Group(GroupLifetime(rank), collectives, collectives)
            self.ranks.append(make_rank(parallel, RankSteps(parallel, lambda _epoch, group=group: group)))

    @property
    def batch(self) -> Any:
        """The rows of the sampling rank."""
        return self.ranks[0].batch

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch at every rank."""
        for rank in self.ranks:
            rank.begin_epoch(epoch)

    def execute(self, step: Step, arrival: float) -> StepResult:
        """Executes a step at every rank at once."""

        def one(rank: StepExecutor) -> StepResult:
            torch.set_num_threads(1)
            result = rank.execute(step, arrival)
            if result.refusal is not None:
                self._meeting.abort(str(result.refusal))
            return result

        results = list(self._pool.map(one, self.ranks))
        assert len({result.digests for result in results}) == 1, "the ranks do not agree"
        return results[0]
