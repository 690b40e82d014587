"""Steps of the ranks of a group: which answers they give, what their digests prove, and what ends the group."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from blockyard.contract.parallel import Parallel
from blockyard.contract.sampling import SamplingParams
from blockyard.errors import BlockyardError, Reason
from tests.unit.worker_service.collectives.ranks import gloo_groups
from tests.unit.worker_service.executor import Epoch, make_executor, new_sequence
from worker_service.batch.input_batch import InputBatch
from worker_service.models.loader import load_model
from worker_service.steps.rank_steps import RankSteps
from worker_service.steps.step_executor import StepExecutor

if TYPE_CHECKING:
    from pathlib import Path

    from worker_service.collectives.group import RankGroup

GREEDY = SamplingParams(temperature=0.0)
FIRST = {"new_sequences": (new_sequence(1, [5, 6, 7], [1], GREEDY),), "work": [(1, 3)]}
NEXT = {"work": [(1, 1)]}


@pytest.fixture(scope="module")
def alone(model: Path) -> StepExecutor:
    """A worker's executor of the whole model, in a world of one."""
    loaded = load_model(model, torch.float32, torch.device("cpu"), lambda done, total: None, "reference")
    return make_executor(loaded, num_device_blocks=8)


def rank_executor(alone: StepExecutor, parallel: Parallel, group: RankGroup | None) -> StepExecutor:
    """A rank that computes everything, with the cache and the network of the others: here nothing is summed."""
    ranks = RankSteps(parallel, lambda epoch: group)
    runner = copy.copy(alone.runner)
    runner.join = lambda collectives: None
    return StepExecutor(InputBatch(alone.batch.limits), alone.cache, runner, ranks)


@pytest.fixture
def groups() -> list[RankGroup]:
    return gloo_groups(2)


@pytest.fixture
def pair(alone: StepExecutor, groups: list[RankGroup]) -> tuple[Epoch, Epoch]:
    """Both ranks of a group, at their first epoch."""
    executors = [rank_executor(alone, Parallel(2, 1, rank), groups[rank]) for rank in (0, 1)]
    return Epoch(executors[0], 1), Epoch(executors[1], 1)


def test_a_world_of_one_answers_without_digests(alone: StepExecutor) -> None:
    result = Epoch(alone, 1).execute(**FIRST)
    assert result.digests == (0, 0)
    assert len(result.token_ids) == 1


def test_ranks_agree_and_one_of_them_tells_the_tokens(pair: tuple[Epoch, Epoch]) -> None:
    seen = set()
    for fields in (FIRST, NEXT, NEXT):
        first, second = (rank.execute(**fields) for rank in pair)
        assert first.digests == second.digests
        assert 0 not in first.digests
        assert first.sequence_ids == (1,)
        assert (second.sequence_ids, second.token_ids) == ((), ())
        assert (second.epoch, second.step_id) == (first.epoch, first.step_id)
        assert second.times.forward_seconds > 0
        seen.add(first.digests)
    assert len(seen) == 3


def test_ranks_that_were_told_otherwise_never_agree_again(pair: tuple[Epoch, Epoch]) -> None:
    other = {**FIRST, "new_sequences": (new_sequence(1, [5, 6, 8], [1], GREEDY),)}
    first, second = pair[0].execute(**FIRST), pair[1].execute(**other)
    assert first.digests[0] != second.digests[0]
    first, second = (rank.execute(**NEXT) for rank in pair)
    assert first.digests[0] != second.digests[0]


def test_digests_begin_anew_with_an_epoch(alone: StepExecutor, groups: list[RankGroup]) -> None:
    executor = rank_executor(alone, Parallel(2, 1, 0), groups[0])
    digests = [Epoch(executor, epoch).execute(**FIRST).digests for epoch in (1, 2)]
    assert digests[0] == digests[1]


def test_only_the_last_stage_tells_what_was_sampled(alone: StepExecutor, groups: list[RankGroup]) -> None:
    first, last = (Epoch(rank_executor(alone, Parallel(1, 2, rank), groups[rank]), 1) for rank in (0, 1))
    before, after = (stage.execute(**FIRST, ids_from_scheduler=True) for stage in (first, last))
    assert before.digests == (after.digests[0], 0)
    assert (before.token_ids, len(after.token_ids)) == ((), 1)


def test_a_stage_refuses_steps_that_leave_samples_to_it(alone: StepExecutor, groups: list[RankGroup]) -> None:
    refusal = Epoch(rank_executor(alone, Parallel(1, 2, 0), groups[0]), 1).answer(**FIRST).refusal
    assert refusal is not None
    assert refusal.reason is Reason.WRONG_STATE
    assert groups[0].world.is_broken


def test_a_quiet_step_is_answered_by_the_sampling_rank_alone(alone: StepExecutor, groups: list[RankGroup]) -> None:
    executors = [rank_executor(alone, Parallel(2, 1, rank), groups[rank]) for rank in (0, 1)]
    for quiet in (True, False):
        results = []
        for executor in executors:
            epoch = Epoch(executor, 1)
            step = epoch.make(**FIRST, quiet=quiet)
            results.append(executor.is_silent(step, executor.execute(step, 0.0)))
        assert results == [False, quiet]


def test_a_quiet_step_that_fails_is_answered(alone: StepExecutor, groups: list[RankGroup]) -> None:
    executor = rank_executor(alone, Parallel(2, 1, 1), groups[1])
    epoch = Epoch(executor, 1)
    step = epoch.make(work=[(77, 1)], quiet=True)
    assert not executor.is_silent(step, executor.execute(step, 0.0))


def test_all_ranks_reject_the_same_sequence(pair: tuple[Epoch, Epoch]) -> None:
    wrong = new_sequence(2, [2**30], [2], GREEDY)
    step = {"new_sequences": (*FIRST["new_sequences"], wrong), "work": [(1, 3), (2, 1)]}
    first, second = (epoch.execute(**step) for epoch in pair)
    assert first.digests == second.digests
    assert [sequence_id for sequence_id, _ in first.failures] == [2]
    assert (len(first.sequence_ids), second.failures) == (1, ())


def test_a_rank_that_refuses_a_step_frees_its_peers(pair: tuple[Epoch, Epoch], groups: list[RankGroup]) -> None:
    refused = pair[0].answer(work=[(77, 1)])
    assert refused.refusal is not None
    assert refused.refusal.reason is Reason.FIELD_INVALID
    with pytest.raises(BlockyardError) as raised:
        groups[1].world.add(torch.ones(1, 1))
    assert raised.value.reason is Reason.GROUP_BROKEN


def test_a_rank_that_breaks_in_a_step_frees_its_peers(
    alone: StepExecutor, groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = rank_executor(alone, Parallel(2, 1, 0), groups[0])

    def fail(*args: Any) -> None:
        raise RuntimeError("a test")

    monkeypatch.setattr(executor.cache, "transfer", fail)
    refusal = Epoch(executor, 1).answer(**FIRST).refusal
    assert refusal is not None
    assert refusal.reason is Reason.BUG
    with pytest.raises(BlockyardError):
        groups[1].world.add(torch.ones(1, 1))


def test_steps_in_a_broken_group_say_so(pair: tuple[Epoch, Epoch], groups: list[RankGroup]) -> None:
    groups[0].lifetime.abort("a test")
    refusal = pair[0].answer(**FIRST).refusal
    assert refusal is not None
    assert (refusal.reason, refusal.message) == (Reason.GROUP_BROKEN, "a test")


def test_what_was_computed_while_the_group_broke_is_not_believed(
    alone: StepExecutor, groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = rank_executor(alone, Parallel(2, 1, 0), groups[0])
    monkeypatch.setattr(executor.cache, "transfer", lambda *args: groups[0].lifetime.abort("a test"))
    result = Epoch(executor, 1).answer(**FIRST)
    assert result.refusal is not None
    assert result.refusal.reason is Reason.GROUP_BROKEN
    assert result.token_ids == ()


def test_a_step_without_a_group_is_refused(alone: StepExecutor) -> None:
    refusal = Epoch(rank_executor(alone, Parallel(2, 1, 0), None), 1).answer(**FIRST).refusal
    assert refusal is not None
    assert "no group was formed for epoch 1" in refusal.message


def test_the_time_of_a_step_is_that_of_its_operations(
    alone: StepExecutor, groups: list[RankGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = rank_executor(alone, Parallel(2, 1, 0), groups[0])
    seen: list[float] = []
    monkeypatch.setattr(executor.cache, "transfer", lambda *args: seen.append(groups[0].lifetime.seconds_left))
    epoch = Epoch(executor, 1)
    # However long it has waited for the steps before it.
    executor.execute(epoch.make(**FIRST, timeout_seconds=5e6), -1e6)
    assert 4e6 < seen[0] <= 5e6
    assert np.isinf(groups[0].lifetime.seconds_left)
