"""What operators see of the core: preemptions by their kind, what waits, and what was looked up in the prefix cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler_service.core.scheduler import Scheduler
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec


@pytest.mark.parametrize(("mode", "are_swaps"), [("swap", True), ("recompute", False)])
def test_swaps_are_counted_among_preemptions_and_by_a_successor(mode: str, are_swaps: bool) -> None:
    bench = Bench(configure(num_device_blocks=5, preemption_mode=mode))
    bench.add(make_spec("a", 7, 6))
    bench.add(make_spec("b", 4, 6))
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.num_preemptions_total > 0
    assert (stats.num_swaps_total == stats.num_preemptions_total) is are_swaps
    assert are_swaps or stats.num_swaps_total == 0
    successor = Scheduler(configure(num_device_blocks=30))
    successor.succeed(bench.scheduler)
    assert successor.stats().num_swaps_total == stats.num_swaps_total
    assert successor.stats().num_queried_tokens_total == stats.num_queried_tokens_total == 11


def test_a_prompt_whose_log_probabilities_are_wanted_is_not_looked_up() -> None:
    bench = Bench(configure())
    bench.add(make_spec("a", 6, 3))
    bench.add(replace(make_spec("b", 9, 3), computes_prompt=True))
    bench.run()
    stats = bench.scheduler.stats()
    assert stats.num_prompt_tokens_total == 15
    assert stats.num_queried_tokens_total == 6


def test_what_waits_is_counted_in_tokens_that_are_known() -> None:
    bench = Bench(configure(max_num_seqs=1))
    bench.add(make_spec("a", 6, 3))
    bench.add(make_spec("b", 9, 3, n=1))
    bench.add(make_spec("c", 4, 3))
    assert bench.scheduler.stats().num_waiting_tokens == 19
    bench.send()
    assert bench.scheduler.stats().num_waiting_tokens == 13
    bench.run()
    assert bench.scheduler.stats().num_waiting_tokens == 0
