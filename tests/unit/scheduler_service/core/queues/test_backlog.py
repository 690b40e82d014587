"""What waits for all replicas: order, fairness between tenants, limits; against a naive model, and counted."""

from __future__ import annotations

import pytest

from scheduler_service.core.queues import backlog as backlog_module
from scheduler_service.core.queues.adapter_queues import MAX_ABSENT_ADAPTERS
from scheduler_service.core.queues.backlog import Backlog
from scheduler_service.core.queues.overload import Limit, Limits, Overload
from scheduler_service.core.sequence import Group
from tests.unit.scheduler_service.core.harness import make_spec


def make_group(
    request_id: str, tenant: str = "", priority: int = 0, num_prompt_tokens: int = 10, lora_id: int = 0
) -> Group:
    spec = make_spec(request_id, (1,) * num_prompt_tokens, 5, tenant=tenant, priority=priority, lora_id=lora_id)
    return Group(spec, 1, num_prompt_tokens + 5, 0.0)


def fill(backlog: Backlog, *names: str, num_prompt_tokens: int = 10) -> dict[str, Group]:
    """One request for each name, a second apart; the tenant is what stands before the dot."""
    groups = {name: make_group(name, name.partition(".")[0], num_prompt_tokens=num_prompt_tokens) for name in names}
    for now, group in enumerate(groups.values()):
        backlog.push(group, float(now))
    return groups


def drain(backlog: Backlog) -> list[str]:
    return [backlog.pop().spec.request_id for _ in range(len(backlog))]


# Order


def test_one_tenant_is_served_first_come_first_served_whatever_the_priority() -> None:
    backlog = Backlog("fcfs", 30.0)
    for name, priority in (("a", 5), ("b", 0), ("c", -5)):
        backlog.push(make_group(name, priority=priority), 1.0)
    assert drain(backlog) == ["a", "b", "c"]


def test_a_level_of_priority_is_worth_so_many_seconds_of_waiting() -> None:
    backlog = Backlog("priority", 30.0)
    backlog.push(make_group("later", priority=1), 0.0)
    backlog.push(make_group("sooner", priority=0), 29.0)
    backlog.push(make_group("too late", priority=0), 31.0)
    backlog.push(make_group("first", priority=-1), 50.0)
    assert drain(backlog) == ["first", "sooner", "later", "too late"]


def test_one_that_came_long_ago_elsewhere_keeps_its_age() -> None:
    backlog = Backlog("fcfs", 30.0)
    backlog.push(make_group("a"), 10.0)
    backlog.push(make_group("b"), 4.0)
    assert drain(backlog) == ["b", "a"]


def test_interrupted_requests_come_before_all_others_in_their_order() -> None:
    backlog = Backlog("priority", 30.0)
    fill(backlog, "a.1", "b.1")
    backlog.push_front([make_group("x"), make_group("y")])
    backlog.push_front([make_group("v"), make_group("w")])
    assert [group.spec.request_id for group in backlog] == ["v", "w", "x", "y", "a.1", "b.1"]
    assert drain(backlog) == ["v", "w", "x", "y", "a.1", "b.1"]


def test_interrupted_requests_are_at_nobodys_expense() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, "a.1", "b.1")
    backlog.push_front([make_group("a.0", "a", num_prompt_tokens=1000)])
    assert drain(backlog) == ["a.0", "a.1", "b.1"]


def test_peeking_changes_nothing() -> None:
    backlog = Backlog("fcfs", 30.0)
    assert backlog.peek() is None
    groups = fill(backlog, "a.1", "a.2")
    assert backlog.peek() is backlog.peek() is groups["a.1"]
    assert (len(backlog), backlog.num_tokens) == (2, 20)


def test_an_empty_backlog_has_nothing_to_pop() -> None:
    with pytest.raises(IndexError, match="no request waits"):
        Backlog("fcfs", 30.0).pop()


def test_a_request_waits_once() -> None:
    backlog = Backlog("fcfs", 30.0)
    groups = fill(backlog, "a.1")
    with pytest.raises(ValueError, match=r"a\.1 is already waiting"):
        backlog.push(make_group("a.1"), 0.0)
    with pytest.raises(ValueError, match=r"a\.1 is already waiting"):
        backlog.push_front(groups.values())
    assert (len(backlog), backlog.num_tokens) == (1, 10)


def test_a_request_is_removed_from_wherever_it_stands() -> None:
    backlog = Backlog("fcfs", 30.0)
    groups = fill(backlog, "a.1", "a.2", "b.1")
    front = make_group("front")
    backlog.push_front([front])
    assert backlog.remove(groups["a.1"])
    assert backlog.remove(front)
    assert not backlog.remove(front)
    assert not backlog.remove(make_group("a.2", "a"))  # another one of that name
    assert (len(backlog), backlog.num_tokens) == (2, 20)
    assert drain(backlog) == ["a.2", "b.1"]


# Fairness


def test_tenants_take_turns_by_the_tokens_of_their_prompts() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, "long.1", "long.2", "long.3", num_prompt_tokens=30)
    fill(backlog, "short.1", "short.2", "short.3", "short.4", num_prompt_tokens=10)
    assert drain(backlog) == ["long.1", "short.1", "short.2", "short.3", "long.2", "short.4", "long.3"]


def test_output_tokens_count_as_they_come() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, "a.1", "a.2", "a.3", "b.1", "b.2", "b.3")
    assert [backlog.pop().spec.request_id for _ in range(2)] == ["a.1", "b.1"]
    backlog.charge("b", 0, 15)
    assert drain(backlog) == ["a.2", "a.3", "b.2", "b.3"]


def test_one_that_comes_while_another_floods_is_next() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, *(f"flood.{n}" for n in range(20)))
    for _ in range(5):
        backlog.pop()
    backlog.push(make_group("quiet.1", "quiet"), 100.0)
    assert backlog.pop().spec.request_id == "quiet.1"


def test_who_stays_away_saves_up_nothing() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, "a.1", "b.1", *(f"b.{n}" for n in range(2, 50)))
    for _ in range(30):
        backlog.pop()
    fill(backlog, *(f"a.{n}" for n in range(2, 9)))
    assert drain(backlog)[:6] == ["a.2", "b.30", "a.3", "b.31", "a.4", "b.32"]


def test_what_an_idle_system_gave_is_no_debt() -> None:
    backlog = Backlog("fcfs", 30.0)
    backlog.charge("a", 0, 1_000_000)
    fill(backlog, "a.1")
    backlog.pop()
    backlog.charge("a", 0, 1_000_000)
    fill(backlog, "a.2", "b.1", "a.3", "b.2")
    assert drain(backlog) == ["a.2", "b.1", "a.3", "b.2"]


def test_what_somebody_gets_while_others_wait_is_a_debt_until_nobody_waits() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, "b.1", "b.2", "b.3", "b.4")
    backlog.charge("a", 0, 25)  # it runs, and nothing of it waits
    fill(backlog, "a.1", "a.2")
    assert drain(backlog) == ["b.1", "b.2", "b.3", "a.1", "b.4", "a.2"]
    fill(backlog, "a.1", "b.1")
    assert drain(backlog) == ["a.1", "b.1"]


def test_one_request_at_a_time_gets_nobody_ahead() -> None:
    """Who pushes a request whenever its last one is taken gets its share of three, not every second turn."""
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, *(f"{tenant}.{n}" for n in range(30) for tenant in "bc"))
    turns: list[str] = []
    for n in range(30):
        if not any(group.spec.tenant == "a" for group in backlog):
            backlog.push(make_group(f"a.{n}", "a"), 100.0 + n)
        turns.append(backlog.pop().spec.tenant)
    assert {tenant: turns.count(tenant) for tenant in "abc"} == {"a": 10, "b": 10, "c": 10}


# Limits


def test_without_limits_everything_may_wait() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, "a.1", num_prompt_tokens=10_000)
    assert backlog.check(make_group("a.2", "a").spec) is None


def test_who_floods_the_queue_closes_it_for_nobody_else() -> None:
    backlog = Backlog("fcfs", 30.0, Limits(max_waiting_requests=4))
    fill(backlog, "a.1", "a.2", "a.3", "a.4")
    assert backlog.check(make_group("a.5", "a").spec) == Overload(Limit.QUEUE_FULL, num_requests=1)
    for name in ("b.1", "b.2"):
        assert backlog.check(make_group(name, "b").spec) is None
        fill(backlog, name)
    # It has its half of the places now.
    assert backlog.check(make_group("b.3", "b").spec) == Overload(Limit.QUEUE_FULL, num_requests=3)
    assert backlog.check(make_group("c.1", "c").spec) is None


def test_half_of_the_places_can_be_kept_free() -> None:
    backlog = Backlog("fcfs", 30.0, Limits(max_waiting_requests=4))
    fill(backlog, "a.1", "a.2")
    spec = make_group("a.3", "a").spec
    assert backlog.check(spec) is None
    assert backlog.check(spec, leaves_room=True) == Overload(Limit.QUEUE_FULL, num_requests=1)


def test_who_finds_the_other_half_in_use_comes_after_those_who_were_promised_it_and_no_later() -> None:
    backlog = Backlog("fcfs", 30.0, Limits(max_waiting_requests=8, max_waiting_tokens=80))
    fill(backlog, *(f"a.{number}" for number in range(7)))
    one, long = make_group("a.8", "a").spec, make_group("a.9", "a", num_prompt_tokens=15).spec
    assert backlog.check(one, leaves_room=True) == Overload(Limit.QUEUE_FULL, num_requests=1)
    only_tokens = Backlog("fcfs", 30.0, Limits(max_waiting_tokens=80))
    fill(only_tokens, *(f"a.{number}" for number in range(6)))
    assert only_tokens.check(long, leaves_room=True) == Overload(Limit.TOKEN_BACKLOG, num_tokens=15)
    fill(only_tokens, "a.6", "a.7")
    assert only_tokens.check(long, leaves_room=True) == Overload(Limit.TOKEN_BACKLOG, num_tokens=15)
    only_tokens.push_front([make_group("x")])
    assert only_tokens.check(long, leaves_room=True) == Overload(Limit.TOKEN_BACKLOG, num_tokens=25)


def test_requests_are_limited_with_those_pushed_in_front() -> None:
    backlog = Backlog("fcfs", 30.0, Limits(max_waiting_requests=3))
    fill(backlog, "a.1", "a.2")
    assert backlog.check(make_group("b.1").spec) is None
    backlog.push_front([make_group("x"), make_group("y")])
    assert backlog.check(make_group("a.3", "a").spec) == Overload(Limit.QUEUE_FULL, num_requests=2)


def test_tokens_are_limited_but_a_long_prompt_may_wait_alone() -> None:
    backlog = Backlog("fcfs", 30.0, Limits(max_waiting_tokens=25))
    long = make_group("long", num_prompt_tokens=100)
    assert backlog.check(long.spec) is None
    fill(backlog, "a.1")
    assert backlog.check(make_group("b", num_prompt_tokens=15).spec) is None
    assert backlog.check(make_group("b", num_prompt_tokens=20).spec) == Overload(Limit.TOKEN_BACKLOG, num_tokens=5)
    assert backlog.check(long.spec) == Overload(Limit.TOKEN_BACKLOG, num_tokens=10)


def test_a_tenant_has_a_quota_that_interrupted_requests_are_outside_of() -> None:
    backlog = Backlog("fcfs", 30.0, Limits(max_tenant_requests=2))
    backlog.push_front([make_group("a.8", "a"), make_group("a.9", "a")])
    groups = fill(backlog, "a.1", "a.2", "b.1")
    assert backlog.check(make_group("b.2", "b").spec) is None
    assert backlog.check(make_group("a.3", "a").spec) == Overload(Limit.TENANT_QUOTA, num_requests=2)
    assert backlog.remove(groups["a.2"])
    assert backlog.check(make_group("a.3", "a").spec) is None


# What it costs


def count_places(backlog: Backlog) -> int:
    """Everything that a backlog keeps in its heaps."""
    tenants = backlog._tenants.values()
    heaps = [tenant.adapters._heaps.values() if tenant.adapters else (tenant.waiting,) for tenant in tenants]
    return len(backlog._turns) + sum(len(heap._places) for each in heaps for heap in each)


class CountedTime(float):
    """A time that counts how often it is compared."""

    num_compared = 0

    def __lt__(self, other: float) -> bool:
        CountedTime.num_compared += 1
        return float.__lt__(self, other)

    def __eq__(self, other: object) -> bool:
        CountedTime.num_compared += 1
        return float.__eq__(self, other)

    __hash__ = float.__hash__


@pytest.mark.parametrize("num_waiting", [100, 10_000])
def test_many_that_wait_cost_a_logarithm(num_waiting: int) -> None:
    backlog = Backlog("fcfs", 30.0)
    for number in range(num_waiting):
        backlog.push(make_group(f"r{number}"), CountedTime(number))
    CountedTime.num_compared = 0
    for number in range(50):
        backlog.push(make_group(f"late{number}"), CountedTime(number + 0.5))
        backlog.pop()
    depth = num_waiting.bit_length() + 1
    # An equality and an order at each level: up once for a push, down and up for a pop, with two children to choose of.
    assert CountedTime.num_compared <= 50 * 2 * 4 * depth


def test_removals_from_many_cost_no_walk() -> None:
    backlog = Backlog("fcfs", 30.0)
    groups = [make_group(f"r{number}") for number in range(10_000)]
    for number, group in enumerate(groups):
        backlog.push(group, CountedTime(number))
    CountedTime.num_compared = 0
    for group in groups[:0:-1]:
        assert backlog.remove(group)
        assert count_places(backlog) <= 2 * len(backlog) + 2 * backlog_module.MIN_HEAP_TO_SWEEP
    assert CountedTime.num_compared <= 4 * len(groups)


def test_tenants_that_come_once_leave_nothing_behind() -> None:
    backlog = Backlog("fcfs", 30.0)
    fill(backlog, "stays.1")
    for number in range(3 * backlog_module.MAX_ABSENT_TENANTS):
        group = make_group(f"r{number}", f"tenant {number}")
        backlog.push(group, 0.0)
        backlog.remove(group)
    assert len(backlog._absent) == backlog_module.MAX_ABSENT_TENANTS
    assert count_places(backlog) <= 2 + 2 * backlog_module.MIN_HEAP_TO_SWEEP
    backlog.pop()
    assert not backlog._absent
    assert not count_places(backlog)


def test_behind_those_that_ran_before_it_is_still_known_whose_turn_it_is() -> None:
    backlog = Backlog("fcfs", 30.0)
    backlog.push(make_group("new", "quiet"), 0.0)
    backlog.push_front([make_group("front", "flood")])
    front, new = backlog.peek(), backlog.peek_new()
    assert front is not None and new is not None
    assert (front.spec.request_id, new.spec.request_id) == ("front", "new")
    backlog.take(new)
    assert (backlog.peek(), backlog.peek_new()) == (front, None)
    assert backlog.pop() is front
    assert len(backlog) == 0


def fill_loras(backlog: Backlog, *names: str, tenant: str = "") -> None:
    """Requests `a.1`, …, each with the adapter of its letter; those of `0.1` have none."""
    for now, name in enumerate(names):
        lora_id = 0 if name[0] == "0" else ord(name[0])
        spec = make_spec(name, 10, tenant=tenant, lora_id=lora_id)
        backlog.push(Group(spec, 1, 100, float(now)), float(now))


def test_adapters_of_a_tenant_take_turns_by_the_tokens_of_their_prompts() -> None:
    backlog = Backlog("fcfs", 60.0)
    fill_loras(backlog, "a.1", "a.2", "a.3", "0.1", "b.1", "b.2", "0.2")
    assert drain(backlog) == ["a.1", "0.1", "b.1", "a.2", "0.2", "b.2", "a.3"]


def test_output_tokens_of_an_adapter_count_as_they_come() -> None:
    """Also while nothing of it waits, until nothing of its tenant does."""
    backlog = Backlog("fcfs", 60.0)
    fill_loras(backlog, "a.1", "a.2", "a.3", "0.1", "0.2", "0.3")
    assert [backlog.pop().spec.request_id for _ in range(2)] == ["a.1", "0.1"]
    backlog.charge("", ord("a"), 15)
    backlog.charge("", ord("b"), 5)
    fill_loras(backlog, "b.1")
    assert drain(backlog) == ["0.2", "b.1", "0.3", "a.2", "a.3"]
    fill_loras(backlog, "a.1", "0.1")
    assert drain(backlog) == ["a.1", "0.1"]


def test_adapters_that_owe_are_forgotten_where_there_are_too_many() -> None:
    backlog = Backlog("fcfs", 60.0)
    fill_loras(backlog, "0.1", "0.2", "0.3")
    for lora_id in range(ord("a"), ord("a") + MAX_ABSENT_ADAPTERS + 1):
        backlog.charge("", lora_id, 15)
    fill_loras(backlog, "b.1", "a.1")
    assert drain(backlog) == ["0.1", "a.1", "0.2", "b.1", "0.3"]


def test_with_priorities_the_first_of_all_adapters_is_next() -> None:
    backlog = Backlog("priority", 60.0)
    fill_loras(backlog, "a.1", "a.2", "b.1", "a.3")
    assert drain(backlog) == ["a.1", "a.2", "b.1", "a.3"]


def test_requests_that_wait_for_a_slot_are_passed() -> None:
    backlog = Backlog("fcfs", 60.0)
    fill_loras(backlog, "a.1", "a.2", "b.1", tenant="one")
    fill_loras(backlog, "a.3", "0.1", tenant="another")
    passed = {ord("a")}
    seen: list[str] = []
    while (group := backlog.peek(passed)) is not None:
        seen.append(group.spec.request_id)
        backlog.take(group)
    assert seen == ["b.1", "0.1"]
    assert sorted(drain(backlog)) == ["a.1", "a.2", "a.3"]


def test_interrupted_requests_are_passed_too() -> None:
    backlog = Backlog("fcfs", 60.0)
    groups = [Group(make_spec(name, 10, lora_id=lora_id), 1, 100, 0.0) for name, lora_id in (("x", 1), ("y", 2))]
    backlog.push_front(groups)
    assert backlog.peek({1}) is groups[1]
    assert backlog.peek({1, 2}) is None
