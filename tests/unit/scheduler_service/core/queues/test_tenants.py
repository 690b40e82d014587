"""Tenants share the rows: one that has none takes one of those that another has too many of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec


def add(bench: Bench, name: str, max_tokens: int = 40, **changes: object) -> int:
    """A request of the tenant that stands before the dot."""
    spec = make_spec(name, 6, max_tokens)
    return bench.add(replace(spec, tenant=name.partition(".")[0], **changes))  # type: ignore[arg-type]


def flood(num_rows: int = 4, *, mode: str = "recompute") -> Bench:
    """All rows are of one tenant, and have long to go."""
    bench = Bench(configure(max_num_seqs=num_rows, preemption_mode=mode))
    for number in range(num_rows):
        add(bench, f"flood.{number}")
    bench.step()
    bench.step()
    return bench


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_tenant_without_rows_begins_at_once(mode: str) -> None:
    bench = flood(mode=mode)
    quiet = add(bench, "quiet.1", 3)
    assert quiet in bench.step().sequence_ids
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_preemptions_total) == (4, 1)
    bench.run()
    bench.check_tokens()
    assert len(bench.finished) == 5
    # One row was enough.
    assert bench.scheduler.stats().num_preemptions_total == 1


def test_it_gets_one_row_and_then_waits_its_turn() -> None:
    bench = flood()
    first, second = add(bench, "quiet.1"), add(bench, "quiet.2")
    step = bench.step()
    assert first in step.sequence_ids and second not in step.sequence_ids
    assert bench.scheduler.stats().num_preemptions_total == 1
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize("chunk", [0, 1])
def test_who_gives_way_does_so_for_somebody(chunk: int) -> None:
    """What the first gives is not enough, and leaves its tenant no more than a share."""
    bench = Bench(configure(num_device_blocks=7, preemption_mode="recompute", max_prefill_chunk=chunk))
    bench.add(make_spec("rich", 8, 4, n=2, tenant="rich"))
    while not bench.tokens["rich", 1]:
        bench.step()
    bench.step()
    poor = bench.add(make_spec("poor", 1, 2, n=3, tenant="poor"))
    assert poor in [new.sequence_id for new in bench.step().new_sequences]
    bench.run()
    bench.check_tokens()
    assert bench.scheduler.stats().num_preemptions_total == 2


def test_nobody_is_robbed_of_a_share() -> None:
    bench = Bench(configure(max_num_seqs=4))
    for name in ("a.1", "a.2", "b.1", "b.2"):
        add(bench, name)
    bench.step()
    add(bench, "c.1")
    bench.step()
    # Each has two of four rows: with three tenants one is a share, and a tenant keeps that.
    assert bench.scheduler.stats().num_preemptions_total == 1
    add(bench, "d.1")
    bench.step()
    assert bench.scheduler.stats().num_preemptions_total == 2
    add(bench, "e.1")
    bench.step()
    assert bench.scheduler.stats().num_preemptions_total == 2
    bench.run()
    bench.check_tokens()


def test_one_tenant_robs_nobody() -> None:
    bench = flood()
    add(bench, "flood.9")
    bench.step()
    assert bench.scheduler.stats().num_preemptions_total == 0


def test_a_higher_priority_is_not_robbed() -> None:
    bench = Bench(configure(max_num_seqs=2, policy="priority"))
    for name in ("a.1", "a.2"):
        add(bench, name, priority=-1)
    bench.step()
    add(bench, "b.1")
    bench.step()
    assert bench.scheduler.stats().num_preemptions_total == 0
    bench.run()
    bench.check_tokens()


def test_a_group_that_needs_more_rows_than_others_have_too_many_takes_none() -> None:
    bench = flood()
    add(bench, "wide.1", 3, n=3)  # of four rows two are a share
    for _ in range(5):
        bench.step()
    assert bench.scheduler.stats().num_preemptions_total == 0
    bench.run()
    bench.check_tokens()


def test_several_tenants_begin_in_one_step() -> None:
    bench = flood(6, mode="swap")
    wide, quiet = add(bench, "wide.1", 3, n=3), add(bench, "quiet.1", 3)
    step = bench.step()
    assert [new.sequence_id for new in step.new_sequences] == [wide, quiet]
    assert bench.scheduler.stats().num_running == 4  # two of the flood, which is its share
    bench.run()
    bench.check_tokens()


def test_who_waits_of_the_flood_keeps_a_quiet_one_from_nothing() -> None:
    bench = flood()
    for number in range(20):
        add(bench, f"flood.more-{number}")
    quiet = add(bench, "quiet.1", 3)
    assert quiet in bench.step().sequence_ids
    bench.run()
    bench.check_tokens()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_quiet_one_gets_blocks_of_a_tenant_that_holds_most_of_them(mode: str) -> None:
    bench = Bench(configure(max_num_seqs=4, num_device_blocks=9, num_host_blocks=16, preemption_mode=mode))
    bench.add(replace(make_spec("flood.1", 28, 4), tenant="flood"))
    while bench.scheduler.stats().num_free_device_blocks > 1:
        bench.step()
    quiet = add(bench, "quiet.1", 2)
    assert quiet in bench.step().sequence_ids
    bench.run()
    bench.check_tokens()


def test_two_that_hold_most_of_the_blocks_do_not_take_them_from_each_other_in_turn() -> None:
    bench = Bench(configure(max_num_seqs=4, num_device_blocks=9, num_host_blocks=16, preemption_mode="recompute"))
    for tenant in ("a", "b"):
        bench.add(replace(make_spec(f"{tenant}.1", 20, 12), tenant=tenant))
    bench.run()
    bench.check_tokens()
    assert bench.scheduler.stats().num_preemptions_total <= 2


def test_what_is_swapped_out_comes_before_what_waits_elsewhere() -> None:
    bench = Bench(configure(max_num_seqs=4, num_device_blocks=9, num_host_blocks=16, preemption_mode="swap"))
    for number in range(3):
        bench.add(make_spec(f"r{number}", 6, 20))
    while not bench.scheduler.stats().num_swapped:
        bench.step()
    room = bench.scheduler.find_room()
    # There are rows, and yet nobody else should come to wait behind it.
    assert room.num_rows
    assert not room.takes(4, 1)


def test_a_quiet_one_takes_the_rows_of_a_group_that_is_larger_than_a_share() -> None:
    bench = Bench(configure(max_num_seqs=4, max_prefill_chunk=2))
    bench.add(replace(make_spec("flood.1", 20, 4, n=4), tenant="flood"))
    bench.step()
    quiet = add(bench, "quiet.1", 3)
    assert quiet in bench.step().sequence_ids
    bench.run()
    bench.check_tokens()


def test_where_many_have_a_share_those_that_wait_take_nothing_from_them_in_turn() -> None:
    bench = Bench(configure(max_num_seqs=6, num_device_blocks=40))
    for number in range(6):
        bench.add(replace(make_spec(f"t{number}", 4 + 12 * (number == 0), 12), tenant=f"t{number}"))
    bench.step()
    for number in range(6, 30):
        bench.add(replace(make_spec(f"t{number}", 4, 3), tenant=f"t{number}"))
    bench.run()
    bench.check_tokens()
    assert not bench.scheduler.stats().num_preemptions_total
