"""Decodes and encodes what WorkerService says of LoRA adapters."""

from __future__ import annotations

from blockyard.worker.v1 import worker_pb2
from worker_service.lora.limits import LoraLimits


def decode_lora_limits(message: worker_pb2.LoadModelRequest) -> LoraLimits:
    """Decodes the room for adapters; absent: none."""
    if not message.HasField("lora"):
        return LoraLimits()
    limits = message.lora
    return LoraLimits(limits.max_loras, limits.max_lora_rank, limits.max_cpu_loras or limits.max_loras)


def encode_lora(limits: LoraLimits) -> worker_pb2.LoraInfo | None:
    """Encodes what a worker has of LoRA; None: nothing."""
    if not limits.max_loras:
        return None
    return worker_pb2.LoraInfo(
        limits=worker_pb2.LoraLimits(
            max_loras=limits.max_loras, max_lora_rank=limits.max_lora_rank, max_cpu_loras=limits.max_cpu_loras
        )
    )
