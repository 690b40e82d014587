"""The known adapters: by name for new requests, by lora_id for requests that began with them.

A lora_id is never used again, not even by the next scheduler: ids count from the time of a scheduler's start, in parts
of a second that are shorter than any load. Gateways report the adapters that they know when they attach, so that none
is lost with a scheduler.
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

# The beginning of 2026 in seconds since 1970, where ids begin.
FIRST_SECOND = 1_767_225_600
# 2^32 ids last for 17 years.
IDS_PER_SECOND = 8
# No scheduler gave an id this far ahead. If such ids were taken over, they would soon run out.
MAX_ID_JUMP = 2**24


class LoraRegistry:
    """All adapters. `now`: seconds since 1970."""

    def __init__(self, now: float) -> None:
        self._by_id: dict[int, Adapter] = {}
        self._by_name: dict[str, int] = {}
        self._next_id = max(1, int((now - FIRST_SECOND) * IDS_PER_SECOND))
        # Ids that this scheduler gave or removed: reports of gateways about them are outdated.
        self._own: set[int] = set()

    @property
    def all(self) -> list[Adapter]:
        """All adapters that requests have or may have; those for new requests first."""
        named = set(self._by_name.values())
        return sorted(self._by_id.values(), key=lambda adapter: (adapter.lora_id not in named, adapter.lora_id))

    @property
    def named(self) -> list[Adapter]:
        """The adapters for new requests, ordered by name."""
        return [self._by_id[lora_id] for _, lora_id in sorted(self._by_name.items())]

    def find(self, name: str) -> Adapter | None:
        """Finds the adapter that new requests get under a name."""
        return self._by_id.get(self._by_name.get(name, 0))

    def take_id(self) -> int:
        """Returns a lora_id that no adapter ever had."""
        lora_id, self._next_id = self._next_id, self._next_id + 1
        self._own.add(lora_id)
        return lora_id

    def put(self, adapter: Adapter) -> None:
        """Makes a loaded adapter the one for new requests under its name."""
        self._by_id[adapter.lora_id] = adapter
        self._by_name[adapter.name] = adapter.lora_id

    def change(self, adapter: Adapter, *, pinned: bool) -> Adapter:
        changed = self._by_id[adapter.lora_id] = replace(adapter, pinned=pinned)
        return changed

    def withdraw(self, name: str) -> None:
        self._own.add(self._by_name.pop(name))

    def take_over(self, adapters: Iterable[Adapter]) -> bool:
        """Takes over adapters that a gateway knows from an earlier scheduler. Returns whether `named` has more now.

        If two have the same name, the later one counts.
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

        Raises BlockyardError FIELD_INVALID if its lora_id belongs to another adapter.
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
