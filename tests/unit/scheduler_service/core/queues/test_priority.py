"""Who outranks whom, and that it costs nobody a step: `policy="priority"`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from scheduler_service.core.sequence import Group
from scheduler_service.core.values import StepResult
from tests.kit.oracles.core_requests import add_request
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec, rows

if TYPE_CHECKING:
    from scheduler_service.core.scheduler import Scheduler

MODES = pytest.mark.parametrize("mode", ["swap", "recompute"])


def make_bench(**changes: Any) -> Bench:
    """Nobody ages: a step of priority is worth more than any time of arrival. Who gives way starts over."""
    usual = {"policy": "priority", "aging_seconds": 1e9, "preemption_mode": "recompute"}
    return Bench(configure(**{**usual, "enable_host_prefix_cache": False, **changes}))


def names(bench: Bench, sequences: Any) -> list[str]:
    return [bench.names[sequence.sequence_id][0] for sequence in sequences]


def running(bench: Bench) -> list[str]:
    return names(bench, bench.scheduler._queues.running)


def waiting(bench: Bench) -> list[str]:
    return names(bench, bench.scheduler._queues.waiting)


def swapped(bench: Bench) -> list[str]:
    return names(bench, bench.scheduler._queues.swapped)


def fill_and_add_urgent(mode: str, **changes: Any) -> Bench:
    """Two low ones hold six of eight blocks; one that outranks them needs five."""
    bench = make_bench(num_device_blocks=9, preemption_mode=mode, **changes)
    bench.add(make_spec("first", 9, 6, priority=2))
    bench.add(make_spec("second", 9, 6, priority=2))
    bench.step()
    bench.add(make_spec("urgent", 16, 3, priority=-1))
    return bench


@MODES
def test_blocks_are_taken_from_a_lower_priority_in_the_same_step(mode: str) -> None:
    bench = fill_and_add_urgent(mode)
    step = bench.send()
    assert [new.sequence_id for new in step.new_sequences] == [3]
    assert rows(step) == {1: 1, 3: 16}  # the first goes on, and the step is full
    assert (swapped(bench), waiting(bench)) == ((["second"], []) if mode == "swap" else ([], ["second"]))
    assert len(step.blocks_to_swap_out) == (3 if mode == "swap" else 0)  # and none of them is lost
    bench.run()
    assert next(iter(bench.finished)) == ("urgent", 0)
    bench.check_tokens()


@MODES
def test_as_many_give_way_as_are_needed_and_keep_their_order(mode: str) -> None:
    bench = make_bench(num_device_blocks=11, preemption_mode=mode)
    for name in ("a", "b", "c"):
        bench.add(make_spec(name, 9, 6, priority=1))
    bench.step()
    bench.add(make_spec("urgent", 19, 3))
    step = bench.send()
    assert rows(step) == {1: 1, 4: 19}
    assert (swapped(bench) if mode == "swap" else waiting(bench)) == ["b", "c"]
    assert len(step.blocks_to_swap_out) == (6 if mode == "swap" else 0)
    bench.run()
    bench.check_tokens()


@MODES
def test_rows_are_taken_too(mode: str) -> None:
    bench = make_bench(max_num_seqs=3, preemption_mode=mode)
    for number in range(3):
        bench.add(make_spec(f"low {number}", 4, 9, priority=1))
    bench.step()
    bench.add(make_spec("urgent", 4, 3, n=2))
    bench.step()
    assert running(bench) == ["urgent", "low 0"]
    bench.run()
    assert [name for name, _ in bench.finished][:2] == ["urgent", "urgent"]
    bench.check_tokens()


def test_equals_never_preempt_each_other() -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add(make_spec("runs", 4, 6, priority=1))
    bench.step()
    bench.add(make_spec("equal", 4, 6, priority=1))
    bench.add(make_spec("lower", 4, 6, priority=2))
    bench.step()
    assert (running(bench), waiting(bench)) == (["runs"], ["equal", "lower"])
    bench.run()
    assert bench.scheduler.stats().num_preemptions_total == 0


def test_first_come_first_served_knows_no_priority() -> None:
    bench = Bench(configure(max_num_seqs=1))
    bench.add(make_spec("low", 4, 3, priority=5))
    bench.step()
    bench.add(make_spec("lower", 4, 3, priority=9))
    bench.add(make_spec("high", 4, 3, priority=-5))
    bench.run()
    assert list(bench.finished) == [("low", 0), ("lower", 0), ("high", 0)]


def test_who_has_waited_long_enough_is_not_outranked() -> None:
    bench = make_bench(max_num_seqs=1, aging_seconds=10.0)
    bench.add(make_spec("old", 4, 9, priority=2), now=0.0)  # as if it came at 20 with priority 0
    bench.step()
    bench.add(make_spec("late", 4, 9), now=21.0)
    bench.step()
    assert running(bench) == ["old"]
    bench.add(make_spec("sooner", 4, 9), now=19.0)
    bench.step()
    assert running(bench) == ["sooner"]
    assert waiting(bench) == ["old", "late"]
    bench.run()
    assert list(bench.finished) == [("sooner", 0), ("old", 0), ("late", 0)]
    bench.check_tokens()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_who_gave_way_keeps_its_place_among_its_equals(mode: str) -> None:
    bench = make_bench(max_num_seqs=1, preemption_mode=mode)
    bench.add(make_spec("early", 4, 6, priority=1), now=0.0)
    bench.step()
    bench.add(make_spec("later", 4, 6, priority=1), now=1.0)
    bench.add(make_spec("urgent", 4, 6), now=2.0)
    bench.run()
    assert list(bench.finished) == [("urgent", 0), ("early", 0), ("later", 0)]
    bench.check_tokens()


def test_the_best_of_those_that_wait_is_asked_first() -> None:
    bench = make_bench(max_num_seqs=1)
    bench.add(make_spec("runs", 4, 6, priority=3))
    bench.step()
    for name, priority in (("b", 2), ("a", 1), ("c", 3)):
        bench.add(make_spec(name, 4, 2, priority=priority))
    bench.step()
    assert (running(bench), waiting(bench)) == (["a"], ["b", "runs", "c"])


@MODES
def test_a_decode_that_needs_a_block_takes_it_from_the_lowest_priority(mode: str) -> None:
    bench = make_bench(num_device_blocks=5, preemption_mode=mode)
    bench.add(make_spec("low", 4, 8, priority=1))
    bench.step()
    bench.add(make_spec("high", 4, 8))  # it began last, and would be the first to go if both were equal
    while not bench.scheduler.stats().num_preemptions_total:
        bench.step()
    assert running(bench) == ["high"]
    bench.run()
    bench.check_tokens()


def test_nobody_gives_way_in_vain() -> None:
    bench = make_bench(num_device_blocks=9)
    bench.add(make_spec("equal", 13, 6))
    bench.add(make_spec("low", 5, 6, priority=1))
    bench.step()
    bench.add(make_spec("large", 24, 3))  # six blocks and one: not even without the low one
    bench.step()
    assert running(bench) == ["equal", "low"]
    assert bench.scheduler.stats().num_preemptions_total == 0
    bench.run()
    bench.check_tokens()


def test_it_is_prefilled_before_others_of_which_pieces_are_left() -> None:
    bench = make_bench(max_num_batched_tokens=8)
    bench.add(make_spec("long", 40, 3, priority=1))
    bench.step()
    bench.add(make_spec("urgent", 7, 3))
    assert rows(bench.step()) == {2: 7, 1: 1}
    bench.run()
    bench.check_tokens()


def test_a_prefill_in_the_middle_gives_way_too() -> None:
    bench = make_bench(num_device_blocks=12, max_prefill_chunk=4, preemption_mode="swap")
    bench.add(make_spec("long", 38, 3, priority=1))
    bench.step()
    bench.step()
    bench.add(make_spec("urgent", 12, 3))
    step = bench.send()
    assert (running(bench), swapped(bench)) == (["urgent"], ["long"])
    assert len(step.blocks_to_swap_out) == 2
    bench.run()
    bench.check_tokens()


def test_it_does_not_wait_for_those_that_are_swapped_out() -> None:
    bench = make_bench(num_device_blocks=12, preemption_mode="swap")
    bench.add(make_spec("a", 16, 12, priority=1))
    bench.add(make_spec("b", 16, 12, priority=2))
    while not bench.scheduler.stats().num_swapped:
        bench.step()
    bench.add(make_spec("equal", 4, 3, priority=2))
    bench.step()
    assert (running(bench), swapped(bench)) == (["a"], ["b"])
    bench.add(make_spec("urgent", 4, 3))
    bench.step()
    assert (running(bench), swapped(bench)) == (["urgent", "a"], ["b"])
    bench.run()
    bench.check_tokens()


def test_of_those_swapped_out_the_highest_priority_comes_back_first() -> None:
    bench = make_bench(preemption_mode="swap", max_num_seqs=2)
    bench.add(make_spec("low", 4, 9, priority=3))
    bench.add(make_spec("lower", 4, 9, priority=4))
    bench.step()
    bench.add(make_spec("middle", 4, 9, priority=2))
    bench.step()
    bench.add(make_spec("high", 4, 9, priority=1))
    bench.step()
    bench.add(make_spec("highest", 4, 9, priority=0))
    bench.step()
    assert (running(bench), swapped(bench)) == (["highest", "high"], ["middle", "low", "lower"])
    bench.run()
    assert [name for name, _ in bench.finished] == ["high", "highest", "middle", "low", "lower"]
    bench.check_tokens()


def test_who_begins_in_a_step_gives_no_block_away_in_it() -> None:
    """Its blocks are not filled yet, or by this very step."""
    bench = make_bench(num_device_blocks=8, preemption_mode="swap")
    bench.add(make_spec("equal", 8, 9))
    bench.add(make_spec("second", 8, 9))
    bench.add(make_spec("low", 5, 9, priority=1))
    bench.step()
    bench.add(make_spec("urgent", 8, 2))
    step = bench.send()  # two need a block, and beside the new one there is only one
    assert rows(step) == {1: 1, 4: 8}
    assert swapped(bench) == ["second", "low"]
    bench.run()
    bench.check_tokens()


def test_one_in_flight_waits_for_its_answers_though_it_outranks_others() -> None:
    bench = make_bench(max_num_seqs=1, max_steps_in_flight=3)
    bench.add(make_spec("middle", 4, 9, priority=1))
    bench.send()
    bench.send()
    bench.add(make_spec("high", 4, 9))
    bench.answer()
    bench.send()
    assert running(bench) == ["high"]
    bench.add(make_spec("low", 4, 9, priority=2))
    bench.scheduler.abort("high")
    assert not bench.send().new_sequences  # "middle" is the first that waits, with a token in flight
    bench.run()
    bench.check_tokens()


def test_swapped_ones_that_hold_shared_blocks_give_them_up_for_it() -> None:
    bench = make_bench(num_device_blocks=9, preemption_mode="swap")
    bench.add(make_spec("low", 14, 9, n=2, priority=1))
    for _ in range(3):
        bench.step()
    bench.add(make_spec("urgent", 28, 3))
    step = bench.send()
    assert 3 in rows(step)
    assert running(bench) == ["urgent"]
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_blocks_shared_with_somebody_who_stays_are_not_counted_on(mode: str) -> None:
    bench = make_bench(num_device_blocks=12, preemption_mode=mode, aging_seconds=10.0, enable_prefix_caching=True)
    bench.add(make_spec("old", tuple(range(16)), 20, priority=1), now=-100.0)
    bench.step()
    bench.add(make_spec("low", (*range(16), 5), 9, priority=1), now=10.0)
    bench.step()
    bench.add(make_spec("urgent", 26, 3), now=1.0)  # it needs more than what "low" does not share
    for _ in range(3):
        bench.step()
    assert running(bench) == ["old", "low"]
    assert bench.scheduler.stats().num_preemptions_total == 0
    bench.run()
    bench.check_tokens()


# What a replica takes from elsewhere


def make_group(name: str, priority: int, arrived_at: float = 0.0) -> Group:
    spec = make_spec(name, 4, 3, priority=priority)
    return Group(spec, 90, 7, arrived_at)


def make_full(**changes: Any) -> Scheduler:
    bench = make_bench(max_num_seqs=1, **changes)
    bench.add(make_spec("low", 4, 9, priority=1))
    bench.step()
    return bench.scheduler


def test_one_that_outranks_somebody_is_taken_without_room() -> None:
    room = make_full().find_room()
    urgent = make_group("urgent", 0)
    assert not room.takes(4, 1)
    assert room.takes_urgent(urgent)
    assert not room.takes_urgent(make_group("equal", 1))
    room.take(4, 1)
    assert not room.takes_urgent(urgent)


def test_a_second_one_waits_until_the_first_has_begun() -> None:
    scheduler = make_full()
    add_request(scheduler, make_spec("urgent", 4, 3), 100)
    assert not scheduler.find_room().takes_urgent(make_group("second", 0))
    assert scheduler.schedule() is not None
    assert scheduler.find_room().takes_urgent(make_group("second", -1))


def test_victims_that_wait_keep_nobody_out() -> None:
    scheduler = make_full(preemption_mode="recompute")
    for number in range(3):
        add_request(scheduler, make_spec(f"urgent {number}", 4, 3, priority=-number), 100 + number)
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(StepResult(step.step_id, step.sequence_ids, (1,)))
    assert len(scheduler._queues.waiting) == 3
    assert scheduler.find_room().takes_urgent(make_group("one more", -3))


def test_nobody_is_urgent_where_priorities_do_not_count() -> None:
    assert not make_full(policy="fcfs").find_room().takes_urgent(make_group("high", -9))
