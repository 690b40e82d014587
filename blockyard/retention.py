"""Keeps values for a limited time, within bounds. Callers pass in the current time."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class _Entry(NamedTuple, Generic[V]):
    value: V
    weight: int
    added_at: float


class Retention(Generic[K, V]):
    """A map whose entries are dropped when they are too old, and oldest first when they are too many or too heavy."""

    def __init__(self, *, max_age_seconds: float, max_entries: int, max_weight: int) -> None:
        self._max_age_seconds = max_age_seconds
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: K, value: V, weight: int, now: float) -> None:
        """Adds a value, replacing one with the same key. A value heavier than the whole limit is not kept."""
        self.pop(key)
        self._entries[key] = _Entry(value, weight, now)
        self._weight += weight
        while len(self._entries) > self._max_entries or self._weight > self._max_weight:
            self._drop_oldest()
        self.expire(now)

    def get(self, key: K) -> V | None:
        """Returns the value of a key; None if it is not kept any more."""
        entry = self._entries.get(key)
        return entry.value if entry else None

    def values(self) -> list[V]:
        """Returns the kept values, oldest first."""
        return [entry.value for entry in self._entries.values()]

    def items(self) -> list[tuple[K, V]]:
        """Returns the keys and the kept values, oldest first."""
        return [(key, entry.value) for key, entry in self._entries.items()]

    def pop(self, key: K) -> V | None:
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._weight -= entry.weight
        return entry.value

    def expire(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values())).added_at <= now - self._max_age_seconds:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self._weight -= entry.weight
