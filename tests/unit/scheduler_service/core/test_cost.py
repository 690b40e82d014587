"""Whether to swap or to compute again: by what the worker's timings say of both."""

from __future__ import annotations

import pytest

from scheduler_service.core.cost import CostModel, StepWork
from tests.unit.scheduler_service.core.harness import crowd, make_spec

BLOCK_SIZE = 16


def measured(seconds_per_token: float, seconds_per_block: float) -> CostModel:
    costs = CostModel(BLOCK_SIZE)
    for number in range(20):
        num_tokens = 64 * (1 + number % 5)
        costs.note_step(StepWork(num_tokens, 0, 0), 1e-3 + num_tokens * seconds_per_token, 0.0)
        costs.note_step(StepWork(0, 4, 3), 1e-3, 3 * seconds_per_block)
    return costs


def test_the_guess_prefers_to_move_what_is_worth_moving() -> None:
    costs = CostModel(BLOCK_SIZE)
    assert costs.prefers_swap(1000)
    assert costs.prefers_swap(BLOCK_SIZE)
    assert not costs.prefers_swap(1)  # a block twice, for a token
    assert costs.prefers_host_block()


def test_it_measures_both_ways() -> None:
    costs = measured(1e-4, 2e-4)
    assert costs.recompute_seconds(100) == pytest.approx(1e-2, rel=0.05)
    assert costs.swap_seconds(10) == pytest.approx(2e-3)
    assert costs.prefers_swap(100)
    assert costs.preempt_seconds(100) == pytest.approx(2 * 7 * 2e-4)
    assert costs.prefers_host_block()


def test_a_slow_link_makes_computing_cheaper() -> None:
    costs = measured(1e-4, 1e-2)
    assert not costs.prefers_swap(1000)
    assert not costs.prefers_host_block()
    assert costs.preempt_seconds(100) == costs.recompute_seconds(100)


def test_it_follows_a_link_that_becomes_slower() -> None:
    costs = measured(1e-4, 1e-5)
    for _ in range(60):
        costs.note_step(StepWork(0, 1, 3), 1e-3, 3e-1)
    assert costs.swap_seconds(1) == pytest.approx(1e-1, rel=0.01)


def test_a_link_that_is_slow_takes_a_hundredth_of_the_time() -> None:
    costs = CostModel(BLOCK_SIZE)
    now = moving = 0.0
    while now < 3600:
        costs.pass_time(now)
        if costs.prefers_host_block():
            costs.note_step(StepWork(0, 1, 100), 1e-3, 10.0)
            moving, now = moving + 10.0, now + 10.0
        now += 1e-1
    assert 20 <= moving <= 40


def test_a_measure_outlives_a_pause_of_seconds() -> None:
    costs = measured(1e-4, 1e-2)
    costs.pass_time(5.0)
    assert not costs.prefers_swap(1000)
    costs.pass_time(60.0)
    assert costs.prefers_swap(1000)


def test_what_the_worker_does_not_say_counts_for_nothing() -> None:
    costs, silent = CostModel(BLOCK_SIZE), CostModel(BLOCK_SIZE)
    for _ in range(20):
        silent.note_step(StepWork(10, 10, 10), 0.0, 0.0)
        silent.note_step(StepWork(0, 0, 0), 1.0, 1.0)
    assert silent == costs


@pytest.mark.parametrize(("cache_seconds", "num_swapped"), [(1e-6, 1), (60.0, 0)])
def test_a_victim_is_swapped_out_only_where_that_is_cheaper(cache_seconds: float, num_swapped: int) -> None:
    bench = crowd("auto")
    bench.scheduler._costs.note_step(StepWork(0, 1, 1), 0.0, cache_seconds)
    bench.send()
    stats = bench.scheduler.stats()
    assert (stats.num_swapped, stats.num_waiting) == (num_swapped, 1 - num_swapped)
    bench.run()
    bench.check_tokens()


def test_a_fixed_mode_asks_nobody() -> None:
    bench = crowd("swap")
    bench.scheduler._costs.note_step(StepWork(0, 1, 1), 0.0, 60.0)
    bench.send()
    assert bench.scheduler.stats().num_swapped == 1


def test_the_steps_tell_what_they_did() -> None:
    bench = crowd("swap", enable_host_prefix_cache=False)
    bench.add(make_spec("c", 1, 1))
    bench.send()
    step = bench.scheduler._in_flight[-1]
    assert step.work == StepWork(num_prefill_tokens=0, num_decodes=1, num_swapped_blocks=2, takes_memory=True)
    bench.run()
    bench.add(make_spec("d", 9, 3, n=2))
    for work in (StepWork(8, 0, 0), StepWork(1, 0, 0), StepWork(0, 2, 0)):
        bench.send()
        assert bench.scheduler._in_flight[-1].work == work
        bench.answer()
