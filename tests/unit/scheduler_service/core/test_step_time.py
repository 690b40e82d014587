"""The model of a step's time: it finds what the worker's timings say, soon, and is not thrown off by odd ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.core.step_time import NUM_MEASURED, StepTimeModel

BASE, PER_TOKEN, PER_DECODE = 8e-3, 5e-5, 2e-5


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
