"""The walk over all state sees what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from scheduler_service.core.sequence import SequenceStatus
from scheduler_service.core.step import StepBuilder
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_service.core.scheduler import Scheduler


def make_scheduler() -> Scheduler:
    """Somebody in every state: a runs, b prefills, c is swapped out, d waits with a child."""
    bench = Bench(configure(max_prefill_chunk=8, debug_integrity=False))
    bench.add(make_spec("a", 7, 8))
    bench.step()
    bench.add(make_spec("b", 13, 8))
    bench.add(make_spec("c", 7, 8))
    bench.step()
    bench.add(make_spec("d", 9, 8, n=2))
    step = StepBuilder(9, 9)
    bench.scheduler._planner.preemption.preempt(bench.scheduler._queues.running[-1], step)
    bench.scheduler._blocks.settle(step)
    bench.scheduler.check_integrity()
    stats = bench.scheduler.stats()
    assert (stats.num_running, stats.num_swapped, stats.num_waiting) == (2, 1, 1)
    return bench.scheduler


def running(scheduler: Scheduler, place: int = 0):
    return scheduler._queues.running[place]


def end_unnoticed(scheduler: Scheduler) -> None:
    running(scheduler).status = SequenceStatus.FINISHED


def forget_a_group(scheduler: Scheduler) -> None:
    del scheduler._groups["a"]


def confuse_groups(scheduler: Scheduler) -> None:
    scheduler._groups["z"] = scheduler._groups.pop("a")


def end_a_child(scheduler: Scheduler) -> None:
    scheduler._groups["d"].unforked[0].status = SequenceStatus.FINISHED


def queue_a_child(scheduler: Scheduler) -> None:
    group = scheduler._groups["d"]
    group.unforked = [*group.unforked, group.sequences[0]]


def queue_twice(scheduler: Scheduler) -> None:
    scheduler._queues.running.append(running(scheduler))


def lose(scheduler: Scheduler) -> None:
    scheduler._queues.running.pop(0)


def lose_rows(scheduler: Scheduler) -> None:
    scheduler._queues.num_rows += 1


def exceed_rows(scheduler: Scheduler) -> None:
    scheduler._queues.max_rows = 1


def misplace(scheduler: Scheduler) -> None:
    running(scheduler).status = SequenceStatus.SWAPPED


def lose_a_prefill(scheduler: Scheduler) -> None:
    scheduler._queues.prefilling.clear()


def leak(scheduler: Scheduler) -> None:
    scheduler._blocks.device.allocate()


def leak_on_the_host(scheduler: Scheduler) -> None:
    scheduler._blocks.host.allocate()


def share_a_writer(scheduler: Scheduler) -> None:
    a, c = running(scheduler), running(scheduler, 1)
    scheduler._blocks.device.release(c.block_ids[-1])
    c.block_ids[-1] = a.block_ids[-1]
    scheduler._blocks.device.share(a.block_ids[-1])


def publish_what_is_written(scheduler: Scheduler) -> None:
    b = running(scheduler, 1)
    scheduler._blocks.device.publish(b.block_ids[-1], b"early")


def lose_a_block(scheduler: Scheduler) -> None:
    scheduler._blocks.device.release(running(scheduler).block_ids.pop())


def run_with_a_hole(scheduler: Scheduler) -> None:
    a = running(scheduler)
    scheduler._blocks.device.release(a.block_ids[0])
    a.block_ids[0] = 0


def compute_too_much(scheduler: Scheduler) -> None:
    running(scheduler).num_computed += 5


def grow_too_long(scheduler: Scheduler) -> None:
    running(scheduler).token_ids.extend(range(20))


def schedule_too_much(scheduler: Scheduler) -> None:
    running(scheduler).num_scheduled += 20


def wait_with_kv(scheduler: Scheduler) -> None:
    next(iter(scheduler._queues.waiting)).num_scheduled = 1


def wait_with_blocks(scheduler: Scheduler) -> None:
    sequence = next(iter(scheduler._queues.waiting))
    sequence.block_ids = [scheduler._blocks.device.allocate()]


def lose_host_content(scheduler: Scheduler) -> None:
    sequence = scheduler._queues.swapped[0]
    scheduler._blocks.host.release(sequence.host_blocks.pop(0))


def prefill_nothing(scheduler: Scheduler) -> None:
    b = running(scheduler, 1)
    b.num_scheduled = len(b.token_ids)


def send_too_many(scheduler: Scheduler) -> None:
    scheduler._in_flight.extend([None] * 3)  # type: ignore[list-item]


HARMS: list[Callable[[Scheduler], None]] = [
    end_unnoticed,
    forget_a_group,
    confuse_groups,
    end_a_child,
    queue_a_child,
    queue_twice,
    lose,
    lose_rows,
    exceed_rows,
    misplace,
    lose_a_prefill,
    leak,
    leak_on_the_host,
    share_a_writer,
    publish_what_is_written,
    lose_a_block,
    run_with_a_hole,
    compute_too_much,
    grow_too_long,
    schedule_too_much,
    wait_with_kv,
    wait_with_blocks,
    lose_host_content,
    prefill_nothing,
    send_too_many,
]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_it_is_seen(harm: Callable[[Scheduler], None]) -> None:
    scheduler = make_scheduler()
    harm(scheduler)
    with pytest.raises(AssertionError) as caught:
        scheduler.check_integrity()
    assert str(caught.value)


def test_debug_integrity_walks_after_each_operation() -> None:
    bench = Bench(configure(debug_integrity=True))
    bench.add(make_spec("a"))
    bench.scheduler._blocks.device.allocate()
    with pytest.raises(AssertionError):
        bench.add(make_spec("b"))
    with pytest.raises(AssertionError):
        bench.schedule()
