"""The backlog does what a naive model of it does, whatever happens in whatever order."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_service.core.queues import backlog as backlog_module
from scheduler_service.core.queues.backlog import Backlog
from tests.unit.scheduler_service.core.queues.test_backlog import count_places, make_group

if TYPE_CHECKING:
    from scheduler_service.core.sequence import Group


class NaiveLine:
    def __init__(self, num_served: int) -> None:
        self.num_served = num_served
        self.last_turn = 0


class NaiveTenant:
    def __init__(self) -> None:
        self.num_served = self.last_turn = self.joined = 0
        # Of its adapters, in the order in which they came to wait; and what others of them were served.
        self.lines: dict[int, NaiveLine] = {}
        self.owed: dict[int, int] = {}

    def virtual_time(self) -> int:
        return min((line.num_served for line in self.lines.values()), default=0)

    def push(self, lora_id: int) -> None:
        if lora_id not in self.lines:
            self.lines[lora_id] = NaiveLine(max(self.owed.pop(lora_id, 0), self.virtual_time()))

    def charge(self, lora_id: int, num_tokens: int) -> None:
        if lora_id in self.lines:
            self.lines[lora_id].num_served += num_tokens
        elif self.lines:
            self.owed[lora_id] = self.owed.get(lora_id, self.virtual_time()) + num_tokens

    def keep(self, waiting: set[int]) -> None:
        for lora_id in self.lines.keys() - waiting:
            self.owed[lora_id] = self.lines.pop(lora_id).num_served
        if not waiting:
            self.owed.clear()

    @property
    def key(self) -> tuple[int, int, int]:
        return (self.num_served, self.last_turn, self.joined)


class NaiveBacklog:
    """The same rules over lists that are sorted whenever they are asked."""

    def __init__(self, aging_seconds: float) -> None:
        self.aging_seconds = aging_seconds
        self.front: list[Group] = []
        self.waiting: list[tuple[float, int, Group]] = []
        self.tenants: dict[str, NaiveTenant] = {}
        self.clock = count(1)

    def present(self) -> set[str]:
        return {group.spec.tenant for _, _, group in self.waiting}

    def virtual_time(self) -> int:
        return min((self.tenants[name].num_served for name in self.present()), default=0)

    def push(self, group: Group, now: float) -> None:
        name = group.spec.tenant
        if name not in self.present():
            tenant = self.tenants.setdefault(name, NaiveTenant())
            tenant.num_served = max(tenant.num_served, self.virtual_time())
            tenant.joined = next(self.clock)
        key = now + group.spec.priority * self.aging_seconds
        self.waiting.append((key, next(self.clock), group))
        self.tenants[name].push(group.spec.lora_id)

    def peek(self) -> Group | None:
        if self.front or not self.waiting:
            return self.front[0] if self.front else None
        name = min(self.present(), key=lambda name: self.tenants[name].key)
        places = sorted(place for place in self.waiting if place[2].spec.tenant == name)
        lines = self.tenants[name].lines
        if not self.aging_seconds:
            lora_id = min(lines, key=lambda lora_id: (lines[lora_id].num_served, lines[lora_id].last_turn))
            places = [place for place in places if place[2].spec.lora_id == lora_id]
        return places[0][2]

    def pop(self) -> Group:
        group = self.peek()
        assert group
        if not self.front:
            tenant = self.tenants[group.spec.tenant]
            tenant.num_served += group.prompt_length
            line = tenant.lines[group.spec.lora_id]
            tenant.last_turn = line.last_turn = next(self.clock)
            line.num_served += group.prompt_length
        self.remove(group)
        return group

    def remove(self, group: Group) -> None:
        self.front = [other for other in self.front if other is not group]
        self.waiting = [place for place in self.waiting if place[2] is not group]
        for name, tenant in self.tenants.items():
            tenant.keep({each.spec.lora_id for _, _, each in self.waiting if each.spec.tenant == name})
        if not self.waiting:
            self.tenants.clear()

    def charge(self, name: str, lora_id: int, num_tokens: int) -> None:
        if not self.waiting:
            return
        if name not in self.tenants:
            self.tenants[name] = NaiveTenant()
            self.tenants[name].num_served = self.virtual_time()
        self.tenants[name].num_served += num_tokens
        self.tenants[name].charge(lora_id, num_tokens)

    def groups(self) -> list[Group]:
        return [*self.front, *(group for _, _, group in self.waiting)]


TENANTS = st.sampled_from(["", "a", "b", "c"])
ADAPTERS = st.sampled_from([0, 0, 1, 2])


class BacklogMachine(RuleBasedStateMachine):
    """Whatever is done to both, both say whose turn it is."""

    @initialize(policy=st.sampled_from(["fcfs", "priority"]))
    def start(self, policy) -> None:
        self.real = Backlog(policy, 2.0)
        self.naive = NaiveBacklog(2.0 if policy == "priority" else 0.0)
        self.names = (f"r{number}" for number in count())

    @rule(
        tenant=TENANTS,
        now=st.integers(0, 5),
        priority=st.integers(-2, 2),
        num_prompt_tokens=st.integers(1, 9),
        lora_id=ADAPTERS,
        repeat=st.sampled_from([1, 1, 20]),
    )
    def push(self, tenant: str, now: int, priority: int, num_prompt_tokens: int, lora_id: int, repeat: int) -> None:
        for _ in range(repeat):
            group = make_group(next(self.names), tenant, priority, num_prompt_tokens, lora_id)
            self.real.push(group, float(now))
            self.naive.push(group, float(now))

    @rule(tenants=st.lists(TENANTS, max_size=3))
    def push_front(self, tenants: list[str]) -> None:
        groups = [make_group(next(self.names), tenant) for tenant in tenants]
        self.real.push_front(groups)
        self.naive.front[:0] = groups

    @rule(num_pops=st.sampled_from([1, 1, 3, 15]))
    def pop(self, num_pops: int) -> None:
        for _ in range(min(num_pops, len(self.real))):
            assert self.real.pop() is self.naive.pop()

    @precondition(lambda self: self.naive.groups())
    @rule(data=st.data(), num_removed=st.sampled_from([1, 1, 10]))
    def remove(self, data: st.DataObject, num_removed: int) -> None:
        groups = self.naive.groups()
        first = data.draw(st.integers(0, len(groups) - 1))
        for group in groups[first : first + num_removed]:
            assert self.real.remove(group)
            assert not self.real.remove(group)
            self.naive.remove(group)

    @rule(tenant=TENANTS, lora_id=ADAPTERS, num_tokens=st.integers(0, 30))
    def charge(self, tenant: str, lora_id: int, num_tokens: int) -> None:
        self.real.charge(tenant, lora_id, num_tokens)
        self.naive.charge(tenant, lora_id, num_tokens)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "real"):
            return
        groups = self.naive.groups()
        assert self.real.peek() is self.naive.peek()
        assert (len(self.real), list(self.real)) == (len(groups), groups)
        assert self.real.num_tokens == sum(group.prompt_length for group in groups)
        assert count_places(self.real) <= 3 * len(groups) + 2 * 5 * backlog_module.MIN_HEAP_TO_SWEEP


BacklogMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestBacklogMachine = BacklogMachine.TestCase
