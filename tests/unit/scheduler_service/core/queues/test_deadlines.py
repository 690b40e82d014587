"""Deadlines: against a plain dictionary, and that cancelled ones do not pile up."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from scheduler_service.core.queues.deadlines import MIN_HEAP_TO_SWEEP, Deadline, DeadlineKind, Deadlines

QUEUE, GENERATION = DeadlineKind.QUEUE, DeadlineKind.GENERATION


def test_they_expire_in_order_and_once() -> None:
    deadlines = Deadlines()
    deadlines.add("a", GENERATION, 3.0)
    deadlines.add("a", QUEUE, 1.0)
    deadlines.add("b", QUEUE, 2.0)
    assert deadlines.next_due() == 1.0
    assert deadlines.take_expired(0.9) == []
    assert deadlines.take_expired(2.0) == [Deadline("a", QUEUE), Deadline("b", QUEUE)]
    assert deadlines.take_expired(2.0) == []
    assert (deadlines.next_due(), len(deadlines)) == (3.0, 1)


def test_cancelled_ones_never_come() -> None:
    deadlines = Deadlines()
    for request_id in ("a", "b"):
        deadlines.add(request_id, QUEUE, 1.0)
        deadlines.add(request_id, GENERATION, 2.0)
    deadlines.cancel("a", QUEUE)
    deadlines.cancel("b")
    deadlines.cancel("unknown")
    assert deadlines.next_due() == 2.0
    assert deadlines.take_expired(9.0) == [Deadline("a", GENERATION)]
    assert deadlines.next_due() is None


def test_one_that_is_set_again_is_replaced() -> None:
    deadlines = Deadlines()
    for at in (5.0, 9.0, 7.0, 7.0):
        deadlines.add("a", QUEUE, at)
    assert deadlines.next_due() == 7.0
    assert deadlines.take_expired(6.0) == []
    assert deadlines.take_expired(7.0) == [Deadline("a", QUEUE)]
    assert deadlines.take_expired(99.0) == []


def test_cancelled_ones_do_not_pile_up() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(f"r{number}", QUEUE, 1000.0 - number)
        if number >= 10:
            deadlines.cancel(f"r{number - 10}")
        assert len(deadlines._heap) <= max(2 * len(deadlines), MIN_HEAP_TO_SWEEP)
    assert len(deadlines) == 10


class DeadlinesMachine(RuleBasedStateMachine):
    """Both forget the same."""

    def __init__(self) -> None:
        super().__init__()
        self.real = Deadlines()
        self.naive: dict[Deadline, float] = {}

    @rule(name=st.sampled_from("abcdef"), kind=st.sampled_from(DeadlineKind), at=st.integers(0, 20))
    def add(self, name: str, kind: DeadlineKind, at: int) -> None:
        self.real.add(name, kind, float(at))
        self.naive[Deadline(name, kind)] = float(at)

    @rule(name=st.sampled_from("abcdef"), kind=st.sampled_from([None, *DeadlineKind]))
    def cancel(self, name: str, kind: DeadlineKind | None) -> None:
        self.real.cancel(name, kind)
        self.naive = {
            deadline: at
            for deadline, at in self.naive.items()
            if deadline.request_id != name or kind not in (None, deadline.kind)
        }

    @rule(now=st.integers(0, 20))
    def expire(self, now: int) -> None:
        late = self.real.take_expired(float(now))
        assert [self.naive[deadline] for deadline in late] == sorted(self.naive[deadline] for deadline in late)
        assert set(late) == {deadline for deadline, at in self.naive.items() if at <= now}
        self.naive = {deadline: at for deadline, at in self.naive.items() if at > now}

    @invariant()
    def agrees(self) -> None:
        assert len(self.real) == len(self.naive)
        assert self.real.next_due() == min(self.naive.values(), default=None)


TestDeadlinesMachine = DeadlinesMachine.TestCase
