"""The memory of a fake worker: given up, taken again, loaded anew, by the states of the contract alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.common.v1 import administration_pb2, status_pb2
from blockyard.errors import BlockyardError, Reason
from blockyard.worker.v1 import worker_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TAGS = (administration_pb2.MEMORY_TAG_WEIGHTS, administration_pb2.MEMORY_TAG_KV_CACHE)
READY, SLEEPING, STALE = (
    status_pb2.WORKER_STATE_CACHE_READY,
    status_pb2.WORKER_STATE_SLEEPING,
    status_pb2.WORKER_STATE_STALE,
)


class FakeMemory:
    """The part of a fake worker that sleeps.

    Attributes:
        refuse_sleep: why the next Sleep fails.
        memory_calls: each call, in order: ("Sleep", 2).
    """

    state: int
    refuse_sleep = ""

    def __init__(self) -> None:
        super().__init__()
        self.sleep = worker_pb2.SleepInfo()
        self.weights_version = ""
        self.memory_calls: list[tuple[str, Any]] = []
        self.update = worker_pb2.BeginWeightUpdateRequest()
        self.is_sent = asyncio.Event()

    def _settle(self) -> None:
        stale = STALE if self.sleep.weights_are_stale else READY
        self.state = SLEEPING if self.sleep.asleep else stale

    def _check(self, *states: int) -> None:
        if self.state not in states:
            raise BlockyardError(Reason.WRONG_STATE, f"in state {status_pb2.WorkerState.Name(self.state)}")

    async def Sleep(self, request: worker_pb2.SleepRequest, context: Any) -> Any:
        self._check(READY, SLEEPING)
        if self.refuse_sleep:
            message, self.refuse_sleep = self.refuse_sleep, ""
            raise BlockyardError(Reason.FEATURE_DISABLED, message)
        self.memory_calls.append(("Sleep", request.level))
        is_stale = self.sleep.weights_are_stale or request.level > 1
        self.sleep = worker_pb2.SleepInfo(level=request.level, asleep=TAGS, weights_are_stale=is_stale)
        self._settle()
        return worker_pb2.SleepResponse(freed_bytes=1000, used_bytes=10)

    async def WakeUp(self, request: worker_pb2.WakeUpRequest, context: Any) -> Any:
        self._check(SLEEPING, STALE)
        self.memory_calls.append(("WakeUp", list(request.tags)))
        asleep = [tag for tag in self.sleep.asleep if request.tags and tag not in request.tags]
        self.sleep = worker_pb2.SleepInfo(asleep=asleep, weights_are_stale=self.sleep.weights_are_stale)
        self._settle()
        return worker_pb2.WakeUpResponse(asleep_tags=asleep, weights_are_stale=self.sleep.weights_are_stale)

    async def ReloadWeights(self, request: worker_pb2.ReloadWeightsRequest, context: Any) -> AsyncIterator[Any]:
        self._check(SLEEPING, STALE, READY)
        self.memory_calls.append(("ReloadWeights", request.version))
        yield worker_pb2.ReloadWeightsResponse(progress=worker_pb2.LoadProgress(done_bytes=1, total_bytes=1))
        self.sleep.weights_are_stale = False
        self.weights_version = request.version
        self._settle()
        yield worker_pb2.ReloadWeightsResponse(reloaded=worker_pb2.ReloadedWeights())

    async def BeginWeightUpdate(self, request: worker_pb2.BeginWeightUpdateRequest, context: Any) -> Any:
        self._check(READY, STALE)
        self.memory_calls.append(("BeginWeightUpdate", request.version))
        self.update, self.is_sent = request, asyncio.Event()
        self.sleep.weights_are_stale = True
        self._settle()
        return worker_pb2.BeginWeightUpdateResponse(order=reversed(range(len(request.tensors))))

    async def UpdateWeights(self, request_iterator: Any, context: Any) -> Any:
        self._check(STALE)
        tensors: list[int] = []
        async for message in request_iterator:
            if not tensors and message.ticket != self.update.ticket:
                raise BlockyardError(Reason.PERMISSION_DENIED, "another ticket")
            tensors.append(message.tensor)
        self.memory_calls.append(("UpdateWeights", tensors))
        self.is_sent.set()
        return worker_pb2.UpdateWeightsResponse(num_tensors=len(tensors))

    async def FinishWeightUpdate(self, request: worker_pb2.FinishWeightUpdateRequest, context: Any) -> Any:
        await self.is_sent.wait()
        self.sleep.weights_are_stale = False
        self.weights_version = request.version
        self._settle()
        return worker_pb2.FinishWeightUpdateResponse()
