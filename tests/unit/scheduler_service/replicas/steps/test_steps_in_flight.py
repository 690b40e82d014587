from __future__ import annotations

import asyncio

import pytest

from blockyard.errors import BlockyardError, Reason
from scheduler_service.core.values import SchedulerOutput
from scheduler_service.replicas.steps.steps_in_flight import (
    FIRST_SECONDS,
    NUM_FIRST_STEPS,
    SHORTEST_SECONDS,
    UNKNOWN_SECONDS,
    PipelineDepth,
    StepDeadline,
    StepsInFlight,
)


def experienced(seconds: float, num_tokens: int = 16) -> StepDeadline:
    deadline = StepDeadline()
    for _ in range(NUM_FIRST_STEPS):
        deadline.on_answered(num_tokens, seconds)
    return deadline


def test_a_fixed_limit_is_everybodys() -> None:
    deadline = StepDeadline(0.7)
    deadline.on_answered(1, 50.0)
    assert [deadline.find_seconds(num_tokens) for num_tokens in (1, 100_000)] == [0.7, 0.7]
    assert deadline.shortest_seconds == 0.7


def test_nothing_known_is_generous() -> None:
    assert StepDeadline().find_seconds(1) >= UNKNOWN_SECONDS


def test_short_steps_have_the_shortest_limit() -> None:
    assert experienced(0.001).find_seconds(16) == SHORTEST_SECONDS


def test_the_longest_of_the_recent_similar_steps_counts() -> None:
    deadline = experienced(0.5)
    deadline.on_answered(20, 1.0)
    deadline.on_answered(64, 30.0)
    assert deadline.find_seconds(31) == pytest.approx(20.0)
    for _ in range(32):
        deadline.on_answered(16, 0.2)
    assert deadline.find_seconds(16) == pytest.approx(4.0)


def test_a_larger_step_has_more() -> None:
    deadline = experienced(0.2)
    assert deadline.find_seconds(1024) == pytest.approx(20 * 0.2 * 64)
    assert experienced(0.001).find_seconds(1024) > 50


def test_a_smaller_step_than_any_before_is_not_known() -> None:
    assert experienced(0.2, 64).find_seconds(1) >= UNKNOWN_SECONDS


def test_the_first_steps_of_an_epoch_have_more() -> None:
    deadline = experienced(0.001)
    deadline.begin_epoch()
    assert deadline.find_seconds(16) == FIRST_SECONDS
    for _ in range(NUM_FIRST_STEPS):
        deadline.on_answered(16, 0.001)
    assert deadline.find_seconds(16) == SHORTEST_SECONDS


def test_what_was_given_up_on_has_twice_as_long_next_time() -> None:
    deadline = experienced(0.2)
    before = deadline.find_seconds(16)
    deadline.on_missed(16)
    assert deadline.find_seconds(16) == pytest.approx(2 * before)


def step(step_id: int, num_tokens: int = 1) -> SchedulerOutput:
    return SchedulerOutput(step_id=step_id, sequence_ids=(1,), num_new_tokens=(num_tokens,))


def test_a_draft_may_take_as_long_as_a_token() -> None:
    steps = StepsInFlight(experienced(0.2), lambda: 0.0)
    steps.on_sent(SchedulerOutput(1, sequence_ids=(1, 2), num_new_tokens=(1, 1), max_draft_tokens=(7, 4)))
    assert steps.describe() == [(1, 2, 13)]
    # The answer says how many there were.
    assert steps.on_answered().num_tokens == 2


async def test_an_overdue_step_is_told() -> None:
    loop = asyncio.get_running_loop()
    steps = StepsInFlight(StepDeadline(0.1), loop.time)
    steps.begin_epoch()
    begin = loop.time()
    steps.on_sent(step(1))
    steps.on_sent(step(2))
    with pytest.raises(BlockyardError, match=r"step 1 was not answered within 0\.1 s") as caught:
        await asyncio.wait_for(steps.watch(), 5)
    assert caught.value.reason is Reason.NO_READY_WORKER
    assert loop.time() - begin >= 0.1
    assert steps.oldest == step(1)


async def test_a_step_is_not_charged_for_those_before_it() -> None:
    now = 0.0
    steps = StepsInFlight(StepDeadline(10.0), lambda: now)
    steps.on_sent(step(1))
    steps.on_sent(step(2))
    now = 9.0
    steps.on_answered()
    now = 18.0
    watching = asyncio.create_task(steps.watch())
    await asyncio.sleep(0)
    assert not watching.done()
    now = 19.1
    watching.cancel()
    with pytest.raises(BlockyardError, match="step 2"):
        await asyncio.wait_for(steps.watch(), 5)


def test_ranks_give_a_step_up_a_little_later_than_it_is_missed_whatever_is_before_it() -> None:
    steps = StepsInFlight(StepDeadline(10.0), lambda: 0.0)
    for number in (1, 2):
        steps.on_sent(step(number))
        assert 10.0 < steps.timeout_seconds < 11.0


async def test_a_watch_that_was_stopped_itself_waits_once_more() -> None:
    now = 0.0
    steps = StepsInFlight(StepDeadline(10.0), lambda: now)
    steps.on_sent(step(1))
    now = 100.0
    watching = asyncio.create_task(steps.watch())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not watching.done()
    watching.cancel()


async def test_nothing_is_overdue_while_nothing_is_on_its_way() -> None:
    steps = StepsInFlight(StepDeadline(0.01), asyncio.get_running_loop().time)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(steps.watch(), 0.1)


def run(depth: PipelineDepth, step_seconds: float, num_steps: int) -> int:
    for _ in range(num_steps):
        depth.on_answered(step_seconds)
    return depth.depth


def test_two_steps_are_the_rule() -> None:
    assert PipelineDepth().depth == 2
    assert run(PipelineDepth(), 0.005, 1000) == 2


def test_short_steps_have_three() -> None:
    assert run(PipelineDepth(), 0.001, 1000) == 3


def test_one_that_is_fixed_stays() -> None:
    assert run(PipelineDepth(5, is_fixed=True), 0.010, 100) == 5


def test_a_few_short_steps_change_nothing() -> None:
    assert run(PipelineDepth(), 0.0, 4) == 2


def test_it_goes_back_when_steps_grow_longer() -> None:
    depth = PipelineDepth()
    run(depth, 0.001, 1000)
    assert run(depth, 0.010, 100) == 2


def test_between_the_two_bounds_the_depth_stays() -> None:
    depth = PipelineDepth()
    assert run(depth, 0.002, 1000) == 2
    run(depth, 0.001, 1000)
    assert run(depth, 0.002, 1000) == 3
