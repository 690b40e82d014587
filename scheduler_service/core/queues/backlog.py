"""Requests that wait for room at any replica, and their order. Knows no replica, no block and no clock.

Tenants share by tokens: the next request is the first one of the tenant that was served least. A tenant's service
counts only *while requests wait*: prompt tokens when a request leaves, output tokens as they come. What a tenant gets
from an idle system takes nothing from others and is not counted, and all counts are forgotten once no request waits. A
tenant that arrives starts at the least service among the waiting tenants (the virtual time of fair queueing), or at
what it owes if that is more. So a tenant cannot save up credit by staying away, nor get ahead by having only one
request wait at a time. The adapters of a tenant share in the same way.

Source: start-time fair queueing (Goyal, Vin, Cheng, 1996) over tokens, as in VTC (Sheng et al., 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import TYPE_CHECKING, Literal

from scheduler_service.core.queues.adapter_queues import AdapterQueues
from scheduler_service.core.queues.overload import Limit, Limits, Overload
from scheduler_service.core.queues.request_heap import MIN_HEAP_TO_SWEEP, Entry, RequestHeap

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from scheduler_service.core.sequence import Group
    from scheduler_service.core.values import GroupSpec

MAX_ABSENT_TENANTS = 1024
"""How many tenants without waiting requests are remembered for what they owe; the first to leave is forgotten first."""


class _Tenant:
    """What one tenant has waiting and was served.

    `waiting`: its requests, all of one adapter or of none (`lora_id` 0). Once they are of several, or others of the
    tenant's adapters get tokens, `adapters` has them instead, until none waits. `by_key`: priorities count.
    """

    __slots__ = ("adapters", "by_key", "joined", "last_turn", "lora_id", "name", "num_served", "num_waiting", "waiting")

    def __init__(self, name: str, num_served: int, *, by_key: bool) -> None:
        self.name = name
        self.num_served = num_served
        self.by_key = by_key
        self.last_turn = 0
        self.joined = 0
        self.num_waiting = 0
        self.lora_id = 0
        self.waiting = RequestHeap()
        self.adapters: AdapterQueues | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Orders by service, then by the last turn, then by arrival. A tenant's key never decreases."""
        return (self.num_served, self.last_turn, self.joined)

    def _find_adapters(self, lora_id: int) -> AdapterQueues | None:
        """Returns the queues by adapter, made now if this one is not that of all who wait; None: there is no need."""
        if self.adapters is None and lora_id != self.lora_id and self.num_waiting:
            self.adapters = AdapterQueues(self.lora_id, self.waiting, by_key=self.by_key)
        return self.adapters

    def push(self, lora_id: int, key: float, number: int, entry: Entry) -> None:
        """Adds a request, behind those of its adapter whose key and number are less."""
        if adapters := self._find_adapters(lora_id):
            adapters.push(lora_id, key, number, entry)
        else:
            self.lora_id = lora_id
            self.waiting.push(key, number, entry)
        self.num_waiting += 1

    def find(self, passed: Collection[int]) -> Group | None:
        """Finds the next request, leaving out adapters that are to be passed (0: requests without one)."""
        if self.adapters:
            return self.adapters.find(passed)
        return None if self.lora_id in passed else self.waiting.first

    def serve(self, group: Group, turn: int) -> None:
        """Charges the tenant for a request's prompt. `turn`: more than that of any before."""
        self.num_served += group.prompt_length
        self.last_turn = turn
        if self.adapters:
            self.adapters.serve(group, turn)
        else:
            self.waiting.last_turn = turn

    def charge(self, lora_id: int, num_tokens: int) -> None:
        """Charges the tenant for tokens that its running requests with an adapter, or none, got."""
        self.num_served += num_tokens
        if adapters := self._find_adapters(lora_id):
            adapters.charge(lora_id, num_tokens)

    def remove(self, lora_id: int, entry: Entry) -> None:
        self.num_waiting -= 1
        if not self.num_waiting:
            entry.group = None
            self.waiting, self.adapters = RequestHeap(), None
        elif self.adapters:
            self.adapters.remove(lora_id, entry)
        else:
            self.waiting.remove(entry)


class Backlog:
    """The waiting requests. Each operation takes O(log n) time, amortized over the removals."""

    __slots__ = (
        "_absent",
        "_aging_seconds",
        "_entries",
        "_front",
        "_limits",
        "_numbers",
        "_tenants",
        "_turns",
        "num_tokens",
    )

    def __init__(self, policy: Literal["fcfs", "priority"], aging_seconds: float, limits: Limits | None = None) -> None:
        """A tenant's oldest request is first; with "priority", each level counts as `aging_seconds` of waiting."""
        self._aging_seconds = aging_seconds if policy == "priority" else 0.0
        self._limits = limits or Limits()
        self._front: OrderedDict[str, Group] = OrderedDict()
        self._entries: dict[str, Entry] = {}
        self._tenants: dict[str, _Tenant] = {}  # those with waiting requests
        self._absent: OrderedDict[str, _Tenant] = OrderedDict()
        self._turns: list[tuple[tuple[int, int, int], str]] = []  # a heap; keys may be behind, tenants may have left
        self._numbers = count(1)
        self.num_tokens = 0
        """Prompt tokens of all waiting requests."""

    def __len__(self) -> int:
        return len(self._front) + len(self._entries)

    def __iter__(self) -> Iterator[Group]:
        """Iterates over all requests, in the order of arrival."""
        yield from self._front.values()
        for entry in self._entries.values():
            assert entry.group
            yield entry.group

    # In

    def check(self, spec: GroupSpec, *, leaves_room: bool = False) -> Overload | None:
        """Finds the limit that a new request would exceed; None: it may wait.

        Interrupted requests count towards all limits but a tenant's. A request may always wait alone, however long its
        prompt is. While several tenants wait, one with less than its share of the places may add a request to a full
        queue, so that a tenant that floods the queue closes it for itself alone. With `leaves_room`, half of each limit
        is kept free for rejected requests that were promised a place.
        """
        limits, tenant = self._limits.halved() if leaves_room else self._limits, self._tenants.get(spec.tenant)
        if self._is_below_share(tenant):
            return None
        num_requests = _excess(len(self), 1, limits.max_waiting_requests, self._limits.max_waiting_requests)
        if num_requests:
            return Overload(Limit.QUEUE_FULL, num_requests=num_requests)
        own = len(spec.prompt_token_ids)
        num_tokens = _excess(self.num_tokens, own, limits.max_waiting_tokens, self._limits.max_waiting_tokens)
        if num_tokens and self.num_tokens:
            return Overload(Limit.TOKEN_BACKLOG, num_tokens=min(num_tokens, self.num_tokens))
        num_requests = (tenant.num_waiting if tenant else 0) + 1 - limits.max_tenant_requests
        if limits.max_tenant_requests and num_requests > 0:
            # The other tenants take turns with this one.
            return Overload(Limit.TENANT_QUOTA, num_requests=num_requests * max(len(self._tenants), 1))
        return None

    def _is_below_share(self, tenant: _Tenant | None) -> bool:
        """Whether other tenants wait, and this one has fewer requests waiting than an equal share of the places."""
        num_tenants = len(self._tenants) + (tenant is None)
        num_waiting = tenant.num_waiting if tenant else 0
        return num_tenants > 1 and num_waiting < self._limits.max_waiting_requests // num_tenants

    def push(self, group: Group, now: float) -> None:
        """Adds a new request, whatever the limits say."""
        spec = group.spec
        self._note_in(group)
        tenant = self._tenants.get(spec.tenant) or self._join(spec.tenant)
        entry = self._entries[spec.request_id] = Entry(group)
        key = now + spec.priority * self._aging_seconds if self._aging_seconds else now
        tenant.push(spec.lora_id, key, next(self._numbers), entry)

    def push_front(self, groups: Iterable[Group]) -> None:
        """Adds interrupted requests before all others, in this order. They are not charged to their tenants again."""
        for group in reversed(list(groups)):
            self._note_in(group)
            self._front[group.spec.request_id] = group
            self._front.move_to_end(group.spec.request_id, last=False)

    def _note_in(self, group: Group) -> None:
        request_id = group.spec.request_id
        if request_id in self._front or request_id in self._entries:
            raise ValueError(f"request {request_id} is already waiting")
        self.num_tokens += group.prompt_length

    # Out

    def peek(self, passed: Collection[int] = ()) -> Group | None:
        """Returns the next request, leaving out those with adapters in `passed`; None if there is none."""
        for group in self._front.values():
            if group.spec.lora_id not in passed:
                return group
        return self.peek_new(passed)

    def peek_new(self, passed: Collection[int] = ()) -> Group | None:
        """Returns the next request among those that have not run before."""
        tenant = self._find_next()
        group = tenant.find(passed) if tenant else None
        if group is None and passed:
            # All requests of this tenant are passed over: take the first tenant that has another one.
            tenants = sorted(self._tenants.values(), key=lambda tenant: tenant.key)
            return next((group for each in tenants if (group := each.find(passed))), None)
        return group

    def pop(self) -> Group:
        """Takes the next request. Raises IndexError if none waits."""
        group = self.peek()
        if group is None:
            raise IndexError("no request waits")
        self.take(group)
        return group

    def take(self, group: Group) -> None:
        """Removes a request, and charges its tenant for the prompt unless it ran before."""
        if group.spec.request_id not in self._front:
            self._tenants[group.spec.tenant].serve(group, next(self._numbers))
        self.remove(group)

    def remove(self, group: Group) -> bool:
        """Removes a request from wherever it stands. Returns False if it does not wait here."""
        request_id = group.spec.request_id
        if self._front.get(request_id) is group:
            del self._front[request_id]
        else:
            entry = self._entries.get(request_id)
            if entry is None or entry.group is not group:
                return False
            del self._entries[request_id]
            tenant = self._tenants[group.spec.tenant]
            tenant.remove(group.spec.lora_id, entry)
            if not tenant.num_waiting:
                self._note_gone(tenant)
        self.num_tokens -= group.prompt_length
        return True

    def charge(self, tenant: str, lora_id: int, num_tokens: int) -> None:
        """Charges a tenant, and an adapter among its own (0: none), for tokens that its running requests got."""
        if not self._tenants:
            return
        known = self._tenants.get(tenant) or self._absent.get(tenant)
        if known is None:
            known = self._make(tenant, self._find_virtual_time())
            self._leave(known)
        known.charge(lora_id, num_tokens)

    # Tenants

    def _make(self, name: str, num_served: int) -> _Tenant:
        return _Tenant(name, num_served, by_key=self._aging_seconds > 0)

    def _join(self, name: str) -> _Tenant:
        virtual_time = self._find_virtual_time()
        tenant = self._absent.pop(name, None) or self._make(name, virtual_time)
        tenant.num_served = max(tenant.num_served, virtual_time)
        tenant.joined = next(self._numbers)
        self._tenants[name] = tenant
        heappush(self._turns, (tenant.key, name))
        return tenant

    def _note_gone(self, tenant: _Tenant) -> None:
        del self._tenants[tenant.name]
        if self._tenants:
            self._leave(tenant)
            self._sweep_turns()
        else:
            self._absent.clear()
            self._turns.clear()

    def _leave(self, tenant: _Tenant) -> None:
        self._absent[tenant.name] = tenant
        if len(self._absent) > MAX_ABSENT_TENANTS:
            self._absent.popitem(last=False)

    def _find_virtual_time(self) -> int:
        tenant = self._find_next()
        return tenant.num_served if tenant else 0

    def _find_next(self) -> _Tenant | None:
        """Returns the tenant whose turn it is. Outdated entries of the heap are corrected as they come up."""
        turns = self._turns
        while turns:
            key, name = turns[0]
            tenant = self._tenants.get(name)
            if tenant is None or key[2] != tenant.joined:
                heappop(turns)
            elif key != tenant.key:
                heapreplace(turns, (tenant.key, name))
            else:
                return tenant
        return None

    def _sweep_turns(self) -> None:
        """Rebuilds the heap once most of its entries belong to tenants that have left."""
        if len(self._turns) > max(2 * len(self._tenants), MIN_HEAP_TO_SWEEP):
            self._turns = [(tenant.key, tenant.name) for tenant in self._tenants.values()]
            heapify(self._turns)


def _excess(num_waiting: int, own: int, limit: int, whole_limit: int) -> int:
    """Returns by how much a newcomer of size `own` would exceed the limit; 0: it fits.

    Between `limit` and `whole_limit` are the places kept for requests that were promised one. A newcomer that is
    rejected for those waits for no more than its own size.
    """
    over = num_waiting + own - limit
    return max(min(over, own), num_waiting + own - whole_limit) if limit and over > 0 else 0
