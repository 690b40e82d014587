"""The adapter in each of the device's slots. Steps of an epoch fill the slots; they are empty at its beginning.

Owned by the device thread. Knows no files and no rows.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from blockyard.errors import BlockyardError, Reason
from blockyard.lora.virtual_tokens import FIRST_VIRTUAL_ID
from blockyard_kernels.lora import LoraRows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from worker_service.lora.adapter import AdapterWeights
    from worker_service.step import Array, Step

    Arrivals = tuple[tuple[int, AdapterWeights], ...]
    """Slots, and the adapters that they are to hold."""

NO_ADAPTERS: Mapping[int, AdapterWeights] = MappingProxyType({})


class AdapterSlots:
    def __init__(
        self,
        num_slots: int = 0,
        adapters: Mapping[int, AdapterWeights] = NO_ADAPTERS,
        write: Callable[[int, AdapterWeights | None], None] = lambda slot, adapter: None,
        max_virtual_tokens: int = 0,
    ) -> None:
        """Makes empty slots.

        Args:
            num_slots: the number of slots.
            adapters: the host's cache, by lora_id.
            write: puts an adapter into a slot, or empties the slot.
            max_virtual_tokens: the most virtual tokens of a soft prompt; each slot has this many rows.
        """
        self.lora_ids: Array = np.zeros(num_slots, np.int64)
        """The adapter in each slot; 0: none."""
        # Slots whose adapter changes weights; the other adapters are soft prompts.
        self._has_factors = np.zeros(num_slots, np.bool_)
        self._max_virtual_tokens = max_virtual_tokens
        self._adapters = adapters
        self._write = write
        self._due: list[tuple[int, AdapterWeights]] = []

    def __len__(self) -> int:
        return len(self.lora_ids)

    def knows(self, lora_id: int) -> bool:
        return lora_id in self._adapters

    def num_virtual_tokens(self, lora_id: int) -> int:
        """Returns the number of virtual tokens of an adapter in the host's cache; 0 if it is not a soft prompt."""
        return self._adapters[lora_id].num_virtual_tokens if lora_id else 0

    def clear(self) -> None:
        self._due.clear()
        for slot in np.flatnonzero(self.lora_ids).tolist():
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._write(slot, None)
        self.lora_ids[slot] = 0

    def after(self, step: Step) -> Array:
        """Returns the adapter in each slot once a step has changed them; its slots must be in range."""
        lora_ids = self.lora_ids.copy()
        lora_ids[step.activated_lora_slots] = step.activated_lora_ids
        return lora_ids

    def activate(self, step: Step) -> None:
        """Applies a checked step's changes; `bring` applies them on the device."""
        for slot, lora_id in zip(step.activated_lora_slots.tolist(), step.activated_lora_ids.tolist(), strict=True):
            self._due.append((slot, self._adapters[lora_id]))
            self._has_factors[slot] = not self._adapters[lora_id].num_virtual_tokens
        if len(step.activated_lora_slots):
            self.lora_ids = self.after(step)

    def take_due(self) -> Arrivals:
        """Returns and forgets the changes of slots that the device has not received yet."""
        due, self._due = tuple(self._due), []
        return due

    def bring(self, arrivals: Arrivals) -> None:
        """Writes adapters to the device's slots, after all earlier steps and before the step that activates them."""
        for slot, adapter in arrivals:
            self._write(slot, adapter)

    def release(self, lora_id: int, live: Array) -> None:
        """Empties an adapter's slot; raises BlockyardError WRONG_STATE if a `live` sequence has the adapter."""
        if lora_id in live:
            raise BlockyardError(Reason.WRONG_STATE, f"sequences of this epoch have adapter {lora_id}")
        for slot in np.flatnonzero(self.lora_ids == lora_id).tolist():
            self._empty(slot)

    def find_rows(self, lora_ids: Array, num_rows: Array) -> LoraRows | None:
        """Finds the rows of a step that have LoRA adapters, all of which are in slots.

        Args:
            lora_ids: [C], the adapter of each sequence; 0: none.
            num_rows: [C], the number of rows of each sequence.
        """
        if not len(self.lora_ids) or not np.count_nonzero(lora_ids):
            return None
        slots = self._find_slots(lora_ids)
        slots[~self._has_factors[slots]] = -1
        return LoraRows(slots.repeat(num_rows).astype(np.int32)) if (slots >= 0).any() else None

    def _find_slots(self, lora_ids: Array) -> Array:
        """Returns the slots [C] of adapters [C]; -1: no slot."""
        slots = np.where(lora_ids[:, None] == self.lora_ids, np.arange(len(self)), -1).max(axis=1)
        slots[lora_ids == 0] = -1
        return slots

    def place(self, token_ids: Array, lora_ids: Array, num_rows: Array) -> Array:
        """Returns a step's ids, where virtual tokens have the ids of their slot's rows.

        Args:
            token_ids: [T]; not changed.
            lora_ids: [C], the adapter of each sequence, as in `find_rows`.
            num_rows: [C], the number of rows of each sequence.
        """
        if not self._max_virtual_tokens or not np.count_nonzero(lora_ids):
            return token_ids
        is_virtual = token_ids >= FIRST_VIRTUAL_ID
        if not np.count_nonzero(is_virtual):
            return token_ids
        slots = self._find_slots(lora_ids).repeat(num_rows)
        return token_ids + np.where(is_virtual, slots * self._max_virtual_tokens, 0)
