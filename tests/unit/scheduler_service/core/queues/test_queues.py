"""Order among those that wait: first come, first served, and how far others may pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler_service.core.queues.waiting_queue import MAX_OVERTAKES, MAX_REFUSED, WaitingQueue
from scheduler_service.core.sequence import Group, Sequence
from tests.unit.scheduler_service.core.harness import Bench, configure, make_spec

if TYPE_CHECKING:
    import pytest


def make_sequences(count: int) -> list[Sequence]:
    return [Group(make_spec(f"r{number}"), number, 20, 0.0).sequences[0] for number in range(count)]


def fill(sequences: list[Sequence]) -> WaitingQueue:
    queue = WaitingQueue()
    for sequence in sequences:
        queue.push(sequence)
    return queue


def test_order() -> None:
    a, b, c, d, e = make_sequences(5)
    queue = fill([b, c, d])
    queue.push_front(a)
    queue.replace(c, e)
    queue.remove(d)
    assert list(queue) == [a, b, e]
    assert len(queue) == 3
    queue.clear()
    assert queue.peek(0) is None


def test_only_so_many_are_tried() -> None:
    sequences = make_sequences(MAX_REFUSED + 5)
    queue = fill(sequences)
    assert [queue.peek(place) for place in range(MAX_REFUSED + 1)] == sequences[: MAX_REFUSED + 1]
    assert queue.peek(0, sequences[: MAX_REFUSED + 1]) is None


def test_the_first_is_passed_only_so_often() -> None:
    sequences = make_sequences(MAX_OVERTAKES + 5)
    queue = fill(sequences)
    first = sequences[:1]
    for sequence in sequences[1 : MAX_OVERTAKES + 1]:
        assert queue.peek(1, first) is sequence
        queue.take(sequence, first)
    assert queue.peek(1, first) is None
    assert queue.peek(0) is sequences[0]
    queue.take(sequences[0])
    assert queue.peek(1, sequences[-4:-3]) is sequences[-3]  # the next one has patience of its own
    queue.take(sequences[-3], sequences[-4:-3])
    assert queue._num_overtakes == 1


def test_small_ones_pass_one_that_does_not_fit_now() -> None:
    bench = Bench(configure(num_device_blocks=9))
    bench.add(make_spec("runs", 12, 8))
    bench.step()
    bench.add(make_spec("large", 20, 4))
    bench.add(make_spec("small", 4, 2))
    step = bench.step()
    assert [new.sequence_id for new in step.new_sequences] == [3]
    bench.run()
    assert list(bench.finished) == [("small", 0), ("runs", 0), ("large", 0)]
    bench.check_tokens()


def test_small_ones_do_not_pass_for_ever() -> None:
    bench = Bench(configure(num_device_blocks=9, debug_integrity=False, enable_prefix_caching=False))
    num_small = 0
    bench.add(make_spec("large", 24, 4))
    bench.scheduler.abort("large")
    bench.add(make_spec("runs", 12, 2))
    bench.step()
    bench.add(make_spec("large", 24, 4))
    while ("large", 0) not in bench.finished:
        while bench.scheduler.stats().num_waiting < 4:
            bench.add(make_spec(f"small {num_small}", 4, 4))
            num_small += 1
        bench.step()
        assert num_small < 2 * MAX_OVERTAKES
    assert len(bench.finished) > MAX_OVERTAKES


def test_a_group_that_needs_many_rows_is_passed_too() -> None:
    bench = Bench(configure(max_num_seqs=3))
    bench.add(make_spec("runs", 4, 6))
    bench.step()
    bench.add(make_spec("wide", 4, 3, n=3))
    bench.add(make_spec("single", 4, 2))
    assert [new.sequence_id for new in bench.step().new_sequences] == [5]
    bench.run()
    bench.check_tokens()


def test_ten_thousand_waiting_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """By count, not by clock: no step touches more than a handful of those that wait."""
    bench = Bench(configure(num_device_blocks=9, debug_integrity=False))
    for number in range(10_000):
        bench.add(make_spec(f"r{number}", 9, 20))
    tried: list[int] = []
    peek = WaitingQueue.peek

    def watched(queue: WaitingQueue, place: int, refused: list[Sequence]) -> Sequence | None:
        tried.append(place)
        return peek(queue, place, refused)

    monkeypatch.setattr(WaitingQueue, "peek", watched)
    for _ in range(30):
        tried.clear()
        bench.step()
        num_admitted = len(bench.steps[-1].new_sequences)
        assert len(tried) <= num_admitted + MAX_REFUSED + 3


def test_the_watermark_stays_free_for_those_that_run() -> None:
    bench = Bench(configure(num_device_blocks=11, watermark=0.3))
    bench.add(make_spec("a", 16, 4))  # four of ten, alone: the watermark does not count
    bench.add(make_spec("b", 8, 4))  # two, one more for its next token, and three stay free
    bench.add(make_spec("c", 3, 4))
    bench.step()
    assert bench.scheduler.stats().num_running == 2
    bench.run()
    bench.check_tokens()


def test_the_watermark_never_stops_the_only_one() -> None:
    bench = Bench(configure(num_device_blocks=5, watermark=0.5))
    bench.add(make_spec("a", 14, 3))
    bench.run()
    bench.check_tokens()
