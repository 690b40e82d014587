"""The adapters of a fake worker: their content is their folder's name; one with "missing" in it is not there.

One with "soft" in it is a soft prompt.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from blockyard.errors import BlockyardError, Reason
from blockyard.service import faults
from blockyard.worker.v1 import worker_pb2
from scheduler_service.core.values import LoraSpec

SOFT_TOKENS = 3


def digest_of(path: str) -> str:
    """The digest of the adapter in a folder."""
    return sha256(path.encode()).hexdigest()


class FakeLoras:
    """The part of a fake worker that has adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_limits: worker_pb2.LoraLimits | None = None
        self.adapters: dict[int, worker_pb2.LoraAdapter] = {}
        self.num_lora_loads = 0
        # Of folders whose files have changed.
        self.content: dict[str, str] = {}

    @property
    def max_loras(self) -> int:
        """Slots."""
        return self.lora_limits.max_loras if self.lora_limits else 0

    @property
    def lora_specs(self) -> dict[int, LoraSpec]:
        """The adapters, as sequences have them."""
        return {key: LoraSpec(key, bytes.fromhex(each.digest), each.name) for key, each in self.adapters.items()}

    def lora_info(self) -> worker_pb2.LoraInfo | None:
        """What the worker says of it."""
        if self.lora_limits is None:
            return None
        return worker_pb2.LoraInfo(limits=self.lora_limits, adapters=self.adapters.values())

    async def AddLora(self, request: worker_pb2.AddLoraRequest, context: Any) -> Any:
        if self.lora_limits is None:
            raise BlockyardError(Reason.FEATURE_DISABLED, "no room for adapters")
        if request.lora_id not in self.adapters:
            if len(self.adapters) >= self.lora_limits.max_cpu_loras:
                raise BlockyardError(Reason.WRONG_STATE, "the cache is full")
            if "missing" in request.path:
                raise BlockyardError(Reason.MODEL_NOT_LOADED, f"{request.path} has no adapter_config.json")
            faults.reach(faults.BEFORE_LORA)
            self.num_lora_loads += 1
            is_soft = "soft" in request.path
            self.adapters[request.lora_id] = worker_pb2.LoraAdapter(
                lora_id=request.lora_id,
                name=request.name,
                path=request.path,
                rank=0 if is_soft else 8,
                targets=[] if is_soft else ["q_proj"],
                num_virtual_tokens=SOFT_TOKENS if is_soft else 0,
                digest=digest_of(self.content.get(request.path, request.path)),
                num_bytes=1000,
            )
        return worker_pb2.AddLoraResponse(adapter=self.adapters[request.lora_id])

    async def RemoveLora(self, request: worker_pb2.RemoveLoraRequest, context: Any) -> Any:
        adapter = self.adapters.get(request.lora_id)
        if adapter is not None and adapter.pinned:
            raise BlockyardError(Reason.WRONG_STATE, "it is pinned")
        self.adapters.pop(request.lora_id, None)
        return worker_pb2.RemoveLoraResponse()

    async def PinLora(self, request: worker_pb2.PinLoraRequest, context: Any) -> Any:
        if request.lora_id not in self.adapters:
            raise BlockyardError(Reason.WRONG_STATE, "it is not there")
        self.adapters[request.lora_id].pinned = request.pinned
        return worker_pb2.PinLoraResponse()

    async def ListLoras(self, request: worker_pb2.ListLorasRequest, context: Any) -> Any:
        return worker_pb2.ListLorasResponse(adapters=self.adapters.values())
