"""The adapters that there are: by name those that new requests get, by number those that requests began with.

Numbers are never used again, also not by the scheduler that comes after this one: they begin with the time of its
start, in parts of a second in which nobody loads more than one. Gateways say what they know when they attach, so that
a scheduler's death loses none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from blockyard.errors import Violation, invalid
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from blockyard.contract.scheduling import Adapter

log = EventLogger(__name__)

# Seconds since 1970 at which numbers begin: 2026.
FIRST_SECOND = 1_767_225_600
# 2^32 of them are 17 years.
IDS_PER_SECOND = 8
# A number that is this far ahead no scheduler has given: if such were taken over, soon none would be left.
MAX_ID_JUMP = 2**24


class LoraRegistry:
    """All adapters. `now`: seconds since 1970."""

    def __init__(self, now: float) -> None:
        self._by_id: dict[int, Adapter] = {}
        self._by_name: dict[str, int] = {}
        self._next_id = max(1, int((now - FIRST_SECOND) * IDS_PER_SECOND))
        # Given by this scheduler, or removed by it: what gateways say of them is not news.
        self._own: set[int] = set()

    @property
    def all(self) -> list[Adapter]:
        """All that requests have or may have, those first that new ones may."""
        named = set(self._by_name.values())
        return sorted(self._by_id.values(), key=lambda adapter: (adapter.lora_id not in named, adapter.lora_id))

    @property
    def named(self) -> list[Adapter]:
        """Those that new requests may have, by name."""
        return [self._by_id[lora_id] for _, lora_id in sorted(self._by_name.items())]

    def find(self, name: str) -> Adapter | None:
        """Finds the adapter that new requests get under a name."""
        return self._by_id.get(self._by_name.get(name, 0))

    def take_id(self) -> int:
        """Returns a number that no adapter ever had."""
        lora_id, self._next_id = self._next_id, self._next_id + 1
        self._own.add(lora_id)
        return lora_id

    def put(self, adapter: Adapter) -> None:
        """Lets new requests have an adapter that workers have read, instead of another one of its name."""
        self._by_id[adapter.lora_id] = adapter
        self._by_name[adapter.name] = adapter.lora_id

    def change(self, adapter: Adapter, *, pinned: bool) -> Adapter:
        """Pins an adapter, or unpins it."""
        changed = self._by_id[adapter.lora_id] = replace(adapter, pinned=pinned)
        return changed

    def withdraw(self, name: str) -> None:
        """Lets no new request have an adapter."""
        self._own.add(self._by_name.pop(name))

    def take_over(self, adapters: Iterable[Adapter]) -> bool:
        """Takes over what a gateway was told by an earlier scheduler. Returns whether new requests may have more now.

        Of two with one name the later one is it.
        """
        has_more = False
        for adapter in adapters:
            if adapter.lora_id in self._own or adapter.lora_id in self._by_id:
                continue
            if adapter.lora_id > self._next_id + MAX_ID_JUMP:
                log.warning(
                    "an adapter has an unknown lora_id",
                    name=adapter.name,
                    lora_id=adapter.lora_id,
                )
                continue
            self._next_id = max(self._next_id, adapter.lora_id + 1)
            self._by_id[adapter.lora_id] = adapter
            if adapter.lora_id > self._by_name.get(adapter.name, 0):
                self._by_name[adapter.name] = adapter.lora_id
                has_more = True
        return has_more

    def keep(self, adapter: Adapter) -> None:
        """Keeps the adapter of a request, which began with it.

        Raises BlockyardError FIELD_INVALID if its number is another's.
        """
        known = self._by_id.setdefault(adapter.lora_id, adapter)
        if known.digest != adapter.digest:
            message = f"adapter {adapter.lora_id} is {known.name!r}, and not {adapter.name!r}"
            raise invalid([Violation("lora.digest", message)])

    def drop_unused(self, used: Collection[int]) -> None:
        """Forgets those that no request has, and none may have any more."""
        for lora_id in self._by_id.keys() - set(self._by_name.values()) - set(used):
            self._own.add(lora_id)
            del self._by_id[lora_id]
