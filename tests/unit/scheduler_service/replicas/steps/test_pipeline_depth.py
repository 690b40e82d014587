from __future__ import annotations

from scheduler_service.replicas.steps.pipeline_depth import Pace


def run(pace: Pace, step_seconds: float, num_steps: int) -> int:
    for _ in range(num_steps):
        pace.answered(step_seconds)
    return pace.depth


def test_two_steps_are_the_rule() -> None:
    assert Pace().depth == 2
    assert run(Pace(), 0.005, 1000) == 2


def test_short_steps_have_three() -> None:
    assert run(Pace(), 0.001, 1000) == 3


def test_a_few_short_steps_change_nothing() -> None:
    assert run(Pace(), 0.0, 4) == 2


def test_it_goes_back_when_steps_grow_longer() -> None:
    pace = Pace()
    run(pace, 0.001, 1000)
    assert run(pace, 0.010, 100) == 2


def test_between_the_two_bounds_the_depth_stays() -> None:
    pace = Pace()
    assert run(pace, 0.002, 1000) == 2
    run(pace, 0.001, 1000)
    assert run(pace, 0.002, 1000) == 3
