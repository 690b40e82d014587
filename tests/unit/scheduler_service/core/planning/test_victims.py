"""Who gives way: `victims="auto"` takes whoever loses least for a block."""

from __future__ import annotations

from math import inf

import pytest

from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec


def running(bench: Bench) -> list[str]:
    return [bench.names[sequence.sequence_id][0] for sequence in bench.scheduler._queues.running]


def run_until_preemption(bench: Bench) -> None:
    before = bench.scheduler.stats().num_preemptions_total
    while bench.scheduler.stats().num_preemptions_total == before:
        bench.step()


@pytest.mark.parametrize(("victims", "left"), [("last", ["a", "long"]), ("auto", ["a", "small"])])
def test_a_prefill_that_has_hardly_begun_loses_least(victims: str, left: list[str]) -> None:
    """It holds blocks for all of its prompt and has computed little of it."""
    bench = Bench(configure(num_device_blocks=14, victims=victims, preemption_mode="recompute", max_prefill_chunk=1))
    bench.add(make_spec("a", 2, 12))
    bench.step()
    bench.step()
    bench.add(make_spec("long", 33, 3))
    bench.add(make_spec("small", 1, 12))
    run_until_preemption(bench)
    assert running(bench) == left
    bench.run()
    bench.check_tokens()


def test_of_equals_the_last_one_goes() -> None:
    bench = Bench(configure(num_device_blocks=7, victims="auto"))
    for name in "abc":
        bench.add(make_spec(name, 7, 9))
    run_until_preemption(bench)
    assert running(bench)[0] == "a"
    assert "c" not in running(bench)
    bench.run()
    bench.check_tokens()


def test_who_frees_nothing_is_not_chosen() -> None:
    """The children of a group share their prompt's blocks: the last of them frees its own one only."""
    bench = Bench(configure(num_device_blocks=9, victims="auto", preemption_mode="recompute"))
    bench.add(make_spec("a", 3, 12))
    bench.add(make_spec("b", 4, 12))
    bench.add(make_spec("c", 16, 2, n=2))
    bench.step()
    bench.step()
    b, parent, child = bench.scheduler._queues.running[1:]
    loss = bench.scheduler._planner.preemption._loss
    assert loss(b) < loss(parent) == loss(child) == inf
    bench.run()
    bench.check_tokens()


def test_one_whose_last_token_is_in_flight_loses_nothing() -> None:
    bench = Bench(configure(victims="auto"))
    for name, max_tokens in (("a", 9), ("ends", 2), ("c", 9)):
        bench.add(make_spec(name, 5, max_tokens))
    bench.send()
    bench.send()
    ends, c = bench.scheduler._queues.running[1:]
    loss = bench.scheduler._planner.preemption._loss
    assert loss(ends) == 0 < loss(c)
    bench.run()
    bench.check_tokens()


def test_nobody_before_the_one_that_needs_a_block_gives_way() -> None:
    """Or two could preempt each other for ever."""
    bench = Bench(configure(num_device_blocks=7, victims="auto", preemption_mode="recompute"))
    bench.add(make_spec("a", 15, 2))
    bench.add(make_spec("b", 3, 20))
    while ("a", 0) not in bench.finished:
        bench.step()
        assert "a" in running(bench) or ("a", 0) in bench.finished
    bench.run()
    bench.check_tokens()
