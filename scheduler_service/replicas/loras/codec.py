"""Encodes and decodes what workers are told of adapters, and what they say of them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blockyard.lora.virtual_tokens import MAX_VIRTUAL_TOKENS
from blockyard.worker.v1 import worker_pb2
from scheduler_service.replicas.loras.adapter import Adapter
from scheduler_service.replicas.steps.answer_checks import MAX_CHARACTERS, require

if TYPE_CHECKING:
    from blockyard.capacity.adapters import LoraLimits

_DIGEST = re.compile(r"[0-9a-f]{64}")
MAX_TARGETS = 1024


def encode_limits(limits: LoraLimits) -> worker_pb2.LoraLimits:
    """Encodes the room for adapters."""
    return worker_pb2.LoraLimits(
        max_loras=limits.max_loras,
        max_lora_rank=limits.max_lora_rank,
        max_cpu_loras=limits.max_cpu_loras,
        max_prompt_adapter_tokens=limits.max_prompt_adapter_tokens,
    )


def encode_add(adapter: Adapter) -> worker_pb2.AddLoraRequest:
    """Encodes an adapter to read."""
    return worker_pb2.AddLoraRequest(lora_id=adapter.lora_id, name=adapter.name, path=adapter.path)


def decode_adapter(message: worker_pb2.LoraAdapter) -> Adapter:
    """Decodes what a worker has; raises WrongAnswer."""
    require(message.lora_id > 0, "an adapter without a number")
    require(_DIGEST.fullmatch(message.digest) is not None, f"adapter {message.lora_id} has no digest")
    texts = (message.name, message.path, *message.targets)
    require(len(texts) <= MAX_TARGETS and max(map(len, texts)) <= 4 * MAX_CHARACTERS, "an adapter of long names")
    num_virtual_tokens = message.num_virtual_tokens
    require(num_virtual_tokens <= MAX_VIRTUAL_TOKENS, f"a soft prompt of {num_virtual_tokens} virtual tokens")
    return Adapter(
        lora_id=message.lora_id,
        name=message.name,
        path=message.path,
        digest=message.digest,
        rank=message.rank,
        targets=tuple(message.targets),
        num_bytes=message.num_bytes,
        pinned=message.pinned,
        num_virtual_tokens=num_virtual_tokens,
    )


def decode_adapters(message: worker_pb2.GetWorkerInfoResponse) -> tuple[Adapter, ...]:
    """Decodes the adapters in a worker's cache."""
    return tuple(map(decode_adapter, message.lora.adapters))
