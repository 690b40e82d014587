"""Checks the adapters of a step: those that it puts into slots, and those of the sequences that it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from blockyard.errors import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from worker_service.batch.input_batch import InputBatch
    from worker_service.lora.slots import AdapterSlots
    from worker_service.step import Array, Step


def wrong_loras(step: Step, batch: InputBatch, slots: AdapterSlots) -> Iterable[Violation]:
    """Yields unknown adapters, slots that do not exist, and sequences whose adapter is in no slot."""
    for index, new in enumerate(step.new_sequences):
        if new.lora_id and not slots.knows(new.lora_id):
            yield Violation(f"new_sequences[{index}].lora_id", f"adapter {new.lora_id} is not in the cache")
    wrong = list(_wrong_activations(step, slots))
    yield from wrong
    if wrong or not len(slots) or not step.sequence_ids:
        return
    lora_ids, resident = _adapters(step, batch), slots.after(step)
    missing = (lora_ids != 0) & ~np.isin(lora_ids, resident)
    if np.count_nonzero(missing):
        names = [step.sequence_ids[index] for index in np.flatnonzero(missing)[:8].tolist()]
        yield Violation("sequence_ids", f"the adapters of sequences {names} are in no slot")


def _wrong_activations(step: Step, slots: AdapterSlots) -> Iterable[Violation]:
    chosen, lora_ids = step.activated_lora_slots, step.activated_lora_ids
    if len(chosen) != len(lora_ids):
        yield Violation("activated_lora_ids", "must have the length of activated_lora_slots")
        return
    if not len(chosen):
        return
    if (chosen >= len(slots)).any():
        yield Violation("activated_lora_slots", f"there are {len(slots)} slots")
        return
    if len(np.unique(chosen)) != len(chosen):
        yield Violation("activated_lora_slots", "a slot appears twice")
    unknown = [lora_id for lora_id in lora_ids.tolist() if not slots.knows(lora_id)]
    if unknown:
        yield Violation("activated_lora_ids", f"adapters {unknown[:8]} are not in the cache")
    resident = slots.after(step)
    resident = resident[resident != 0]
    if len(np.unique(resident)) != len(resident):
        yield Violation("activated_lora_ids", "an adapter is in two slots")


def _adapters(step: Step, batch: InputBatch) -> Array:
    """Returns the adapter of each sequence that the step computes; 0: none, or nothing is computed of it."""
    lora_ids = batch.lora_ids(step.sequence_ids)
    changed = {new.sequence_id: new.lora_id for new in step.new_sequences}
    for fork in step.forks:
        parent = fork.parent_id
        changed[fork.child_id] = changed[parent] if parent in changed else int(batch.lora_ids((parent,))[0])
    if changed:
        for index, sequence_id in enumerate(step.sequence_ids):
            if sequence_id in changed:
                lora_ids[index] = changed[sequence_id]
    return lora_ids
