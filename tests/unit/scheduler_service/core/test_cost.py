"""Whether to swap or to compute again, by what the worker's timings say of both.

The model of a step's time finds what the timings say, soon, and is not thrown off by odd ones.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.cost import NUM_MEASURED, CostModel, StepTimeModel, StepWork
from tests.unit.scheduler_service.core.harness import crowd, make_spec

BLOCK_SIZE = 16
BASE, PER_TOKEN, PER_DECODE = 8e-3, 5e-5, 2e-5


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


def true_seconds(num_prefill_tokens: int, num_decodes: int) -> float:
    return BASE + PER_TOKEN * num_prefill_tokens + PER_DECODE * num_decodes


def learn(model: StepTimeModel, num_steps: int, factor: float = 1.0, noise: float = 0.0, seed: int = 1) -> None:
    """Steps of all shapes, every third without a prefill."""
    draw = random.Random(seed)
    for number in range(num_steps):
        shape = draw.randrange(1, 2048) if number % 3 else 0, draw.randrange(256)
        model.note(*shape, factor * true_seconds(*shape) * (1 + noise * draw.uniform(-1, 1)))


def test_it_finds_the_coefficients() -> None:
    model = StepTimeModel()
    learn(model, 60)
    assert model.is_measured
    assert model.seconds_per_prefill_token == pytest.approx(PER_TOKEN, rel=0.01)
    assert model.predict(1000, 100) == pytest.approx(true_seconds(1000, 100), rel=0.01)
    assert model.predict(0, 256) == pytest.approx(true_seconds(0, 256), rel=0.05)


def test_noise_averages_out() -> None:
    model = StepTimeModel()
    learn(model, 300, noise=0.3)
    assert model.predict(1000, 100) == pytest.approx(true_seconds(1000, 100), rel=0.1)


def test_a_step_that_takes_far_too_long_changes_little() -> None:
    model = StepTimeModel()
    learn(model, 60)
    model.note(500, 50, 5.0)
    assert model.predict(500, 50) < 1.3 * true_seconds(500, 50)


def test_it_follows_a_machine_that_becomes_slower() -> None:
    model = StepTimeModel()
    learn(model, 100)
    learn(model, 400, factor=10.0)
    assert model.predict(1000, 100) == pytest.approx(10 * true_seconds(1000, 100), rel=0.1)


def test_a_long_time_without_prefills_does_not_wash_them_away() -> None:
    model = StepTimeModel()
    learn(model, 100)
    for _ in range(5000):
        model.note(0, 200, true_seconds(0, 200))
    assert model.seconds_per_prefill_token == pytest.approx(PER_TOKEN, rel=0.1)


def test_steps_that_never_differ_give_their_own_time() -> None:
    """Base and coefficients cannot be told apart then, and need not be."""
    model = StepTimeModel()
    for _ in range(100):
        model.note(256, 32, 0.03)
        model.note(0, 32, 0.02)
    assert model.predict(0, 32) == pytest.approx(0.02, rel=0.05)
    assert model.predict(256, 32) == pytest.approx(0.03, rel=0.05)


def test_it_is_a_guess_before_enough_was_seen() -> None:
    model = StepTimeModel()
    guess = model.seconds_per_prefill_token
    for number in range(NUM_MEASURED):
        assert not model.is_measured
        assert model.seconds_per_prefill_token == guess
        model.note(100 + number, 0, 1.0)
    assert model.is_measured
    assert model.seconds_per_prefill_token > guess


def test_how_many_tokens_fit_into_a_target() -> None:
    model = StepTimeModel()
    learn(model, 100)
    num_tokens = model.count_prefill_tokens(100, 0.03)
    assert true_seconds(num_tokens, 100) == pytest.approx(0.03, rel=0.02)
    assert model.count_prefill_tokens(100, 0.001) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(0, 1000), st.floats(0, 1e3)).filter(lambda step: sum(step[:2]))
    )
)
def test_nothing_makes_it_absurd(steps: list[tuple[int, int, float]]) -> None:
    model = StepTimeModel()
    for step in steps:
        model.note(*step)
    assert model.seconds_per_prefill_token > 0
    assert 0 <= model.predict(10, 10) < float("inf")
    assert 0 <= model.count_prefill_tokens(10, 0.05) < 10**9
