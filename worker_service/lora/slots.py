"""The slots of the device: which adapter each of them holds. Filled by the steps of an epoch, empty at its beginning.

Owned by the device thread. Knows no files and no rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from worker_service.step import Array, Step


class LoraSlots:
    """Slots of so many adapters; `knows` says whether the host's cache has an adapter."""

    def __init__(self, num_slots: int = 0, knows: Callable[[int], bool] = lambda _: False) -> None:
        self.lora_ids: Array = np.zeros(num_slots, np.int64)
        """The adapter in each slot; 0: none."""
        self.knows = knows

    def __len__(self) -> int:
        return len(self.lora_ids)

    def clear(self) -> None:
        """Empties all slots."""
        self.lora_ids[:] = 0

    def after(self, step: Step) -> Array:
        """Returns the adapter in each slot once a step has changed them; its slots must be in range."""
        lora_ids = self.lora_ids.copy()
        lora_ids[step.activated_lora_slots] = step.activated_lora_ids
        return lora_ids

    def activate(self, step: Step) -> None:
        """Makes a checked step's changes."""
        if len(step.activated_lora_slots):
            self.lora_ids = self.after(step)
