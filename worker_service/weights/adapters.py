"""Reads, pins and removes LoRA adapters at a scheduler's request, while steps run. Knows no messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.contract.workers import WorkerState
from blockyard.errors import BlockyardError, Reason

if TYPE_CHECKING:
    from pathlib import Path

    from worker_service.lora.adapter import AdapterWeights, LoraRequest
    from worker_service.lora.store import LoraStore
    from worker_service.weights.residency import Owner


class Adapters:
    """The adapters of one worker. Methods raise BlockyardError WRONG_STATE, or FEATURE_DISABLED without adapters."""

    def __init__(self, owner: Owner, root: Path | None) -> None:
        """`root`: the folder below which adapters must lie; None: no adapter is read."""
        self._owner = owner
        self.root = root

    def store(self) -> LoraStore:
        self._owner.require(WorkerState.LOADED, WorkerState.CACHE_READY, WorkerState.RUNNING)
        store = self._owner.set_up.loras
        if store is None:
            raise BlockyardError(
                Reason.FEATURE_DISABLED,
                "this worker has no room for LoRA adapters: start the scheduler with --max-loras",
            )
        return store

    async def add(self, request: LoraRequest) -> AdapterWeights:
        """Reads an adapter; see `LoraStore.add`."""
        return await self.store().add(request)

    async def remove(self, lora_id: int) -> None:
        """Removes an adapter that is not pinned and that no sequence uses, and empties its slot, between two steps.

        The load of an adapter that is being read is cancelled.
        """
        store, executor = self.store(), self._owner.set_up.executor
        store.stop_reading(lora_id)

        def remove() -> None:
            if executor is not None and lora_id not in store.pinned:
                # Launched steps may still read the adapter.
                executor.wait()
                executor.runner.slots.release(lora_id, executor.batch.lora_ids())
            store.remove(lora_id)

        await self._owner.run(remove)

    def pin(self, lora_id: int, *, pinned: bool) -> None:
        self.store().pin(lora_id, pinned=pinned)
