"""Answers WorkerService: decodes, asks the worker, encodes. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from blockyard.contract.codec import worker_info, workers
from blockyard.contract.codec.messages import decode_seconds
from blockyard.contract.workers import CollectivesKind, LoadProgress, Placement
from blockyard.errors import Violation, invalid
from blockyard.service import faults
from blockyard.service.log_level import set_log_level
from blockyard.telemetry import EventLogger
from blockyard.tracing.spans import is_tracing
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from worker_service import codec, info
from worker_service.device.device import torch_dtype
from worker_service.lora.adapter import LoraRequest
from worker_service.observe.step_spans import StepSpans
from worker_service.operations.codec import (
    PROFILE_DETAILS,
    decode_head,
    encode_kv_groups,
    encode_profile,
    encode_profile_options,
)
from worker_service.operations.operations import WorkerOperations, deadline
from worker_service.weights.saving import Saving

if TYPE_CHECKING:
    from pathlib import Path

    from worker_service.set_up import SetUp
    from worker_service.steps.step_stream import StepStream
    from worker_service.worker import Worker

log = EventLogger(__name__)

# A reason is kept, reported and logged.
MAX_REASON_LENGTH = 1000

Context = Any
T = TypeVar("T")
OnProgress = Callable[[int, int], None]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(
        self,
        worker: Worker,
        worker_id: str,
        shut_down: Callable[[], None],
        placement: Placement = Placement(),
        port: int = 0,
        operations: WorkerOperations | None = None,
        save_root: Path | None = None,
    ) -> None:
        """`port`: of this; 0: at a Unix socket. `operations`: None: no extensions. `save_root`: see `Saving`."""
        self._worker = worker
        self._operations = operations or WorkerOperations(worker, {})
        self._saving = Saving(worker, save_root, worker.metrics.on_save)
        self._worker_id = worker_id
        self._placement = placement
        self._port = port
        self._shut_down = shut_down
        # These tasks outlive the calls that began them, and the next scheduler finds their results.
        self._loads: set[asyncio.Task[Any]] = set()
        self._set_ups: set[asyncio.Task[Any]] = set()

    async def GetWorkerInfo(self, request: worker_pb2.GetWorkerInfoRequest, context: Context) -> Any:
        told = info.describe_worker(self._worker, self._worker_id, self._placement)
        message = worker_info.encode_worker_info(told)
        if told.model:
            message.kv_groups.extend(encode_kv_groups(self._worker.set_up))
        return message

    async def InitDevice(self, request: worker_pb2.InitDeviceRequest, context: Context) -> Any:
        told = workers.decode_device_request(request)
        dtype, digest = torch_dtype(told.dtype), told.configuration_digest
        await self._to_the_end(self._worker.init_device(told.device_type, dtype, digest, told.parallel))
        return worker_pb2.InitDeviceResponse(device=self._worker.device_name)

    async def OpenRendezvous(self, request: worker_pb2.OpenRendezvousRequest, context: Context) -> Any:
        secret = self._worker.open_rendezvous(request.epoch, tuple(request.members))
        return worker_pb2.OpenRendezvousResponse(port=self._port, secret=secret)

    async def SetRendezvousKey(self, request: worker_pb2.SetRendezvousKeyRequest, context: Context) -> Any:
        point = self._worker.membership.meeting_point(request.epoch, request.secret)
        await point.set(request.key, request.value)
        return worker_pb2.SetRendezvousKeyResponse()

    async def GetRendezvousKey(self, request: worker_pb2.GetRendezvousKeyRequest, context: Context) -> Any:
        """Waits for a value of the group's rendezvous, until the call's deadline."""
        point = self._worker.membership.meeting_point(request.epoch, request.secret)
        return worker_pb2.GetRendezvousKeyResponse(value=await point.get(request.key))

    async def FormGroup(self, request: worker_pb2.FormGroupRequest, context: Context) -> Any:
        """Joins a group. If the caller cancels, the worker leaves the group."""
        kind = await self._worker.form_group(worker_info.decode_group_request(request))
        return worker_pb2.FormGroupResponse(kind=worker_info.COLLECTIVES.encode(CollectivesKind(kind)))

    async def LeaveGroup(self, request: worker_pb2.LeaveGroupRequest, context: Context) -> Any:
        reason = request.reason[:MAX_REASON_LENGTH] or "the scheduler ended the group"
        await self._worker.membership.leave(request.epoch, reason)
        return worker_pb2.LeaveGroupResponse()

    async def LoadModel(self, request: worker_pb2.LoadModelRequest, context: Context) -> AsyncIterator[Any]:
        told = workers.decode_load_request(request)
        how = told.quantization, told.format, told.lora, told.task, told.kv_cache_dtype
        events = self._load(lambda on_progress: self._worker.load_model(told.model, told.revision, on_progress, *how))
        async for event in events:
            is_progress = isinstance(event, LoadProgress)
            yield workers.encode_load_event(event if is_progress else info.describe_model(event))

    async def _load(self, load: Callable[[OnProgress], Coroutine[Any, Any, T]]) -> AsyncIterator[LoadProgress | T]:
        """Yields the progress of a load, then its result. The load continues if the caller leaves."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[LoadProgress | None] = asyncio.Queue()

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            loop.call_soon_threadsafe(events.put_nowait, LoadProgress(done_bytes, total_bytes))

        task = asyncio.create_task(load(on_progress))
        self._loads.add(task)
        task.add_done_callback(self._end_load)
        task.add_done_callback(lambda _: events.put_nowait(None))
        while (event := await events.get()) is not None:
            yield event
        yield task.result()

    def _end_load(self, load: asyncio.Task[Any]) -> None:
        self._loads.discard(load)
        if not load.cancelled() and (error := load.exception()) is not None:
            log.error("loading or saving weights failed", reason=str(error))

    async def Sleep(self, request: worker_pb2.SleepRequest, context: Context) -> Any:
        work = self._worker.residency.sleep(request.level, workers.decode_known_tags(request.tags))
        use = await self._to_the_end(work)
        return worker_pb2.SleepResponse(freed_bytes=use.freed_bytes, used_bytes=use.used_bytes)

    async def WakeUp(self, request: worker_pb2.WakeUpRequest, context: Context) -> Any:
        state = await self._to_the_end(self._worker.residency.wake_up(workers.decode_known_tags(request.tags)))
        asleep_tags = workers.encode_tags(state.asleep)
        return worker_pb2.WakeUpResponse(asleep_tags=asleep_tags, weights_are_stale=state.weights_are_stale)

    async def ReloadWeights(self, request: worker_pb2.ReloadWeightsRequest, context: Context) -> AsyncIterator[Any]:
        source = workers.WEIGHTS_SOURCE.decode(request)
        async for event in self._load(lambda on_progress: self._worker.residency.reload(source, on_progress)):
            if isinstance(event, LoadProgress):
                yield worker_pb2.ReloadWeightsResponse(progress=workers.PROGRESS.encode(event))
            else:
                yield worker_pb2.ReloadWeightsResponse(reloaded=_encode_reloaded(event))

    async def _to_the_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Waits for a change of state. It continues if the caller leaves: the device thread cannot be interrupted."""
        task = asyncio.create_task(work)
        self._set_ups.add(task)
        task.add_done_callback(self._end_set_up)
        return await asyncio.shield(task)

    def _end_set_up(self, task: asyncio.Task[Any]) -> None:
        self._set_ups.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a change of state failed", reason=str(error))

    async def DetermineNumAvailableBlocks(self, request: Any, context: Context) -> Any:
        asked = workers.PROFILE_REQUEST.decode(request)
        return workers.AVAILABLE_BLOCKS.encode(await self._worker.determine_num_available_blocks(asked))

    async def InitializeCache(self, request: worker_pb2.InitializeCacheRequest, context: Context) -> Any:
        cache = await self._to_the_end(self._worker.initialize_cache(workers.CACHE_PLAN.decode(request)))
        return worker_pb2.InitializeCacheResponse(cache=workers.CACHE_INFO.encode(cache))

    async def ExecuteModel(self, request_iterator: Any, context: Context) -> AsyncIterator[Any]:
        """Runs one epoch's steps: a task reads them as they come, while answers go out in order."""
        stream = self._worker.open_stream()
        spans = StepSpans() if is_tracing() else None
        reader = asyncio.create_task(self._read(request_iterator, stream, spans))
        try:
            async for result in stream.answers():
                faults.reach(faults.BEFORE_ANSWER)
                if spans is not None:
                    spans.on_result(result)
                yield codec.encode_result(result)
                faults.reach(faults.AFTER_ANSWER)
        finally:
            if spans is not None:
                spans.close()
            self._worker.close_stream(stream)
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader

    async def _read(self, request_iterator: Any, stream: StepStream, spans: StepSpans | None) -> None:
        try:
            async for message in request_iterator:
                step = codec.decode_step(message, stream.max_num_seqs)
                if spans is not None:
                    spans.on_step(step)
                stream.submit(step)
        finally:
            stream.finish()

    async def SaveState(self, request: worker_pb2.SaveStateRequest, context: Context) -> AsyncIterator[Any]:
        told = workers.decode_save_request(request)
        async for event in self._load(lambda on_progress: self._saving.save(told, on_progress)):
            if isinstance(event, LoadProgress):
                yield worker_pb2.SaveStateResponse(progress=workers.PROGRESS.encode(event))
            else:
                yield worker_pb2.SaveStateResponse(saved=workers.SAVED_STATE.encode(event))

    async def AddLora(self, request: worker_pb2.AddLoraRequest, context: Context) -> Any:
        adapter = await self._worker.adapters.add(LoraRequest(request.lora_id, request.name, request.path))
        told = info.describe_adapter(self._worker.adapters.store(), adapter)
        return worker_pb2.AddLoraResponse(adapter=worker_info.ADAPTER.encode(told))

    async def RemoveLora(self, request: worker_pb2.RemoveLoraRequest, context: Context) -> Any:
        await self._to_the_end(self._worker.adapters.remove(request.lora_id))
        return worker_pb2.RemoveLoraResponse()

    async def PinLora(self, request: worker_pb2.PinLoraRequest, context: Context) -> Any:
        self._worker.adapters.pin(request.lora_id, pinned=request.pinned)
        return worker_pb2.PinLoraResponse()

    async def ListLoras(self, request: worker_pb2.ListLorasRequest, context: Context) -> Any:
        store = self._worker.adapters.store()
        adapters = map(worker_info.ADAPTER.encode, info.describe_loras(store).adapters)
        return worker_pb2.ListLorasResponse(adapters=adapters, reading_lora_ids=store.reading)

    async def StartProfile(self, request: worker_pb2.StartProfileRequest, context: Context) -> Any:
        detail = PROFILE_DETAILS.get(request.options.detail)
        options = await self._worker.start_profile(detail, request.options.max_steps)
        return worker_pb2.StartProfileResponse(options=encode_profile_options(options))

    async def StopProfile(self, request: worker_pb2.StopProfileRequest, context: Context) -> AsyncIterator[Any]:
        for message in encode_profile(await self._worker.stop_profile(self._worker_id)):
            yield message

    async def BeginWeightUpdate(self, request: worker_pb2.BeginWeightUpdateRequest, context: Context) -> Any:
        heads = list(map(decode_head, request.tensors))
        order = self._worker.residency.begin_update(request.version, request.ticket, heads)
        return worker_pb2.BeginWeightUpdateResponse(order=order)

    async def UpdateWeights(self, request_iterator: Any, context: Context) -> Any:
        first = await anext(aiter(request_iterator), None)
        if first is None:
            raise invalid([Violation("ticket", "is required")])

        async def pieces() -> AsyncIterator[tuple[int, bytes]]:
            yield first.tensor, first.data
            async for message in request_iterator:
                yield message.tensor, message.data

        update = await self._worker.residency.receive_update(first.ticket, pieces())
        return worker_pb2.UpdateWeightsResponse(num_tensors=update.num_tensors, num_bytes=update.num_bytes)

    async def FinishWeightUpdate(self, request: worker_pb2.FinishWeightUpdateRequest, context: Context) -> Any:
        set_up = await self._worker.residency.finish_update(request.version)
        return worker_pb2.FinishWeightUpdateResponse(updated=_encode_reloaded(set_up))

    async def SetLogLevel(self, request: worker_pb2.SetLogLevelRequest, context: Context) -> Any:
        return worker_pb2.SetLogLevelResponse(previous_level=set_log_level(request.level))

    async def Shutdown(self, request: worker_pb2.ShutdownRequest, context: Context) -> Any:
        """Ends the process, once this is answered."""
        log.info("shutdown requested", reason=request.reason)
        self._shut_down()
        return worker_pb2.ShutdownResponse()

    async def CallExtension(self, request: worker_pb2.CallExtensionRequest, context: Context) -> Any:
        async with deadline(decode_seconds(request, "timeout")):
            result = await self._operations.call(request.extension, request.operation, request.payload)
        return worker_pb2.CallExtensionResponse(result=result)

    async def ChecksumBlocks(self, request: worker_pb2.ChecksumBlocksRequest, context: Context) -> Any:
        device, host = await self._worker.checksum_blocks(list(request.device_block_ids), list(request.host_block_ids))
        return worker_pb2.ChecksumBlocksResponse(device_checksums=device, host_checksums=host)


def _encode_reloaded(set_up: SetUp) -> worker_pb2.ReloadedWeights:
    assert set_up.loaded is not None
    assert set_up.cache is not None
    model = workers.MODEL.encode(info.describe_model(set_up.loaded))
    return worker_pb2.ReloadedWeights(model=model, cache=workers.CACHE_INFO.encode(set_up.cache))
