"""Decodes and encodes what WorkerService says of adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.capacity.adapters import LoraLimits
from blockyard.worker.v1 import worker_pb2
from worker_service.lora.adapter import LoraRequest

if TYPE_CHECKING:
    from worker_service.lora.adapter import Adapter
    from worker_service.lora.store import LoraStore


def decode_lora_limits(message: worker_pb2.LoadModelRequest) -> LoraLimits:
    """Decodes the room for adapters; absent: none."""
    if not message.HasField("lora"):
        return LoraLimits()
    limits = message.lora
    max_cpu_loras = limits.max_cpu_loras or limits.max_loras
    return LoraLimits(limits.max_loras, limits.max_lora_rank, max_cpu_loras, limits.max_prompt_adapter_tokens)


def decode_add(message: worker_pb2.AddLoraRequest) -> LoraRequest:
    """Decodes an adapter that is asked for."""
    return LoraRequest(message.lora_id, message.name, message.path)


def encode_adapter(adapter: Adapter, *, pinned: bool) -> worker_pb2.LoraAdapter:
    """Encodes an adapter of the cache."""
    request = adapter.request
    return worker_pb2.LoraAdapter(
        lora_id=request.lora_id,
        name=request.name,
        path=request.path,
        rank=adapter.rank,
        targets=adapter.targets,
        digest=adapter.digest,
        num_bytes=adapter.num_bytes,
        pinned=pinned,
        num_virtual_tokens=adapter.num_virtual_tokens,
    )


def encode_adapters(store: LoraStore) -> list[worker_pb2.LoraAdapter]:
    """Encodes all adapters of the cache, by lora_id."""
    known = sorted(store.adapters.items())
    return [encode_adapter(adapter, pinned=lora_id in store.pinned) for lora_id, adapter in known]


def encode_lora(store: LoraStore | None) -> worker_pb2.LoraInfo | None:
    """Encodes what a worker has of LoRA; None: nothing."""
    if store is None:
        return None
    limits = store.limits
    return worker_pb2.LoraInfo(
        limits=worker_pb2.LoraLimits(
            max_loras=limits.max_loras,
            max_lora_rank=limits.max_lora_rank,
            max_cpu_loras=limits.max_cpu_loras,
            max_prompt_adapter_tokens=limits.max_prompt_adapter_tokens,
        ),
        adapters=encode_adapters(store),
    )
