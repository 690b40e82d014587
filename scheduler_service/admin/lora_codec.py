"""Encodes an adapter's status."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.scheduling import Adapter
    from scheduler_service.replicas.engine import Engine


def encode_lora(adapter: Adapter, engines: Sequence[Engine]) -> admin_pb2.LoraStatus:
    """Encodes an adapter, the replicas that have it, and its details if a worker has read it."""
    lora_id = adapter.lora_id
    loaded = {engine.replica_id: engine for engine in engines if lora_id in engine.loras.loaded}
    found = next((engine.loras.loaded[lora_id] for engine in loaded.values()), adapter)
    resident = [
        number
        for number, engine in loaded.items()
        if engine.scheduler is not None and lora_id in engine.scheduler.lora_slots.resident_ids
    ]
    return admin_pb2.LoraStatus(
        name=adapter.name,
        lora_id=lora_id,
        path=adapter.path,
        digest=adapter.digest,
        rank=found.rank,
        targets=found.targets,
        num_bytes=found.num_bytes,
        pinned=adapter.pinned,
        loaded_replica_ids=sorted(loaded),
        resident_replica_ids=sorted(resident),
        num_virtual_tokens=adapter.num_virtual_tokens,
    )
