"""The waiting requests of a tenant that uses several adapters: a queue for each adapter, and one for none.

Queues share by tokens, as tenants do: the next request is the first of the queue that was served least, so that a flood
of requests with one adapter, or with none, keeps no other waiting. Served is what an adapter got while requests of the
tenant waited, of prompts and of outputs; it is remembered while others of the tenant wait. With priorities the first of
all queues is next.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from scheduler_service.core.queues.request_heap import Entry, RequestHeap

if TYPE_CHECKING:
    from collections.abc import Collection

    from scheduler_service.core.sequence import Group

MAX_ABSENT_ADAPTERS = 256

"""Adapters remembered for what they owe though none of their requests waits; who left first is forgiven first."""


class AdapterQueues:
    """The queues of one tenant. An operation takes O(log n) time, and O(1) for each adapter that waits.

    Begins with the requests of one adapter, `lora_id` (0: none), which wait already; is of no use once none waits.
    """

    __slots__ = ("_by_key", "_heaps", "_owed")

    def __init__(self, lora_id: int, waiting: RequestHeap, *, by_key: bool) -> None:
        self._by_key = by_key
        self._heaps = {lora_id: waiting}
        # Tokens that adapters got of which nothing waits, while others wait.
        self._owed = OrderedDict[int, int]()

    def push(self, lora_id: int, key: float, number: int, entry: Entry) -> None:
        """Adds a request, behind those of its adapter whose key and number are less."""
        heap = self._heaps.get(lora_id)
        if heap is None:
            heap = self._heaps[lora_id] = RequestHeap(max(self._owed.pop(lora_id, 0), self._find_virtual_time()))
        heap.push(key, number, entry)

    def _find_virtual_time(self) -> int:
        return min(heap.num_served for heap in self._heaps.values())

    def find(self, passed: Collection[int] = ()) -> Group | None:
        """Finds the next request, leaving out adapters that are to be passed (0: requests without one)."""
        heaps = [heap for lora_id, heap in self._heaps.items() if lora_id not in passed]
        return min(heaps, key=self._order).first if heaps else None

    def _order(self, heap: RequestHeap) -> tuple[float, float]:
        return heap.first_key if self._by_key else (heap.num_served, heap.last_turn)

    def serve(self, group: Group, turn: int) -> None:
        """Charges a request's adapter for its prompt. `turn` counts the calls: it is larger each time."""
        heap = self._heaps[group.spec.lora_id]
        heap.num_served += group.prompt_length
        heap.last_turn = turn

    def charge(self, lora_id: int, num_tokens: int) -> None:
        if heap := self._heaps.get(lora_id):
            heap.num_served += num_tokens
        else:
            self._owe(lora_id, self._owed.get(lora_id, self._find_virtual_time()) + num_tokens)

    def _owe(self, lora_id: int, num_served: int) -> None:
        self._owed[lora_id] = num_served
        if len(self._owed) > MAX_ABSENT_ADAPTERS:
            self._owed.popitem(last=False)

    def remove(self, lora_id: int, entry: Entry) -> None:
        heap = self._heaps[lora_id]
        heap.remove(entry)
        if not heap.num_waiting:
            del self._heaps[lora_id]
            self._owe(lora_id, heap.num_served)
