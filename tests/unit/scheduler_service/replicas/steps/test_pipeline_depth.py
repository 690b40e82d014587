from __future__ import annotations

from scheduler_service.replicas.steps.pipeline_depth import PipelineDepth


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
