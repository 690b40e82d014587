"""Prefills beside decodes: pieces small enough that a step keeps to its time, and never so small that they starve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler_service.core.planning.planner import MIN_PREFILL_TOKENS
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

if TYPE_CHECKING:
    from scheduler_service.core.values import SchedulerOutput

PER_TOKEN = 1e-4
TARGET_SECONDS = 10e-3  # beside one decode some eighty tokens


def seconds(step: SchedulerOutput) -> float:
    return 1e-3 + PER_TOKEN * sum(step.num_new_tokens)


def make_bench(target_seconds: float) -> Bench:
    return Bench(
        configure(
            num_device_blocks=600,
            max_model_len=2000,
            max_num_batched_tokens=512,
            target_step_seconds=target_seconds,
            enable_prefix_caching=False,
            debug_integrity=False,
        )
    )


def advance(bench: Bench, num_steps: int) -> list[SchedulerOutput]:
    """Steps with the times that a worker would tell."""
    steps: list[SchedulerOutput] = []
    for _ in range(num_steps):
        steps.append(bench.send())
        bench.times = (seconds(steps[-1]), 0.0)
        bench.answer()
    return steps


def measure(bench: Bench) -> None:
    """Let it see prefills of several sizes, and then one sequence decode."""
    for number in range(10):
        bench.add(make_spec(f"warm up {number}", 20 + 30 * number, 1))
        advance(bench, 1)
    bench.add(make_spec("decodes", 8, 900))
    advance(bench, 5)


@pytest.mark.parametrize("target_seconds", [TARGET_SECONDS, 20e-3])
def test_a_step_with_decodes_keeps_to_its_time(target_seconds: float) -> None:
    bench = make_bench(target_seconds)
    measure(bench)
    bench.add(make_spec("long", 900, 2))
    steps = advance(bench, 3)
    for step in steps:
        assert seconds(step) == pytest.approx(target_seconds, rel=0.1)
    bench.run()
    bench.check_tokens()


def test_without_a_target_a_step_is_filled() -> None:
    bench = make_bench(0.0)
    measure(bench)
    bench.add(make_spec("long", 900, 2))
    assert sum(advance(bench, 1)[0].num_new_tokens) == 512


def test_without_decodes_a_step_is_filled() -> None:
    bench = make_bench(TARGET_SECONDS)
    measure(bench)
    bench.scheduler.abort("decodes")
    bench.add(make_spec("long", 900, 2))
    assert sum(advance(bench, 1)[0].num_new_tokens) == 512


def test_before_anything_is_measured_a_step_is_filled() -> None:
    bench = make_bench(TARGET_SECONDS)
    bench.add(make_spec("decodes", 8, 100))
    advance(bench, 2)
    bench.add(make_spec("long", 900, 2))
    assert sum(advance(bench, 1)[0].num_new_tokens) == 512


def test_a_target_that_cannot_be_kept_starves_nobody() -> None:
    bench = make_bench(1e-6)
    measure(bench)
    bench.add(make_spec("long", 10 * MIN_PREFILL_TOKENS, 2))
    bench.add(make_spec("second", MIN_PREFILL_TOKENS, 2))
    steps = advance(bench, 11)
    assert [sum(step.num_new_tokens) for step in steps[:10]] == [MIN_PREFILL_TOKENS + 1] * 10
    bench.run()
    bench.check_tokens()


def test_the_limit_is_for_all_prefills_of_a_step_together() -> None:
    bench = make_bench(TARGET_SECONDS)
    measure(bench)
    for number in range(5):
        bench.add(make_spec(f"r{number}", 40, 2))
    step = advance(bench, 1)[0]
    assert 2 <= len(step.new_sequences) < 5
    assert seconds(step) == pytest.approx(TARGET_SECONDS, rel=0.1)


def test_swapped_decodes_come_back_beside_a_limited_prefill() -> None:
    bench = Bench(
        configure(
            num_device_blocks=20,
            max_num_batched_tokens=64,
            preemption_mode="swap",
            target_step_seconds=1e-6,
            policy="priority",
            aging_seconds=1e9,
            max_num_seqs=3,
        )
    )
    for number in range(10):
        bench.add(make_spec(f"warm up {number}", 5 + 5 * number, 1))
        advance(bench, 1)
    bench.add(make_spec("decodes", 4, 30))
    bench.add(make_spec("low", 4, 8, priority=2))
    bench.add(make_spec("lower", 4, 8, priority=3))
    bench.step()
    bench.add(make_spec("urgent", 40, 2, priority=1))
    bench.step()
    assert bench.scheduler.stats().num_swapped == 1
    bench.scheduler.abort("low")
    step = bench.send()
    assert max(step.num_new_tokens) < MIN_PREFILL_TOKENS
    assert step.replaced_tables  # and in the same step one is back
    bench.run()
    bench.check_tokens()
