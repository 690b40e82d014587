"""Answers AdminService: status, draining and log level of this gateway. Passes on what the scheduler answers."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.duration_pb2 import Duration

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.common.v1 import status_pb2
from blockyard.errors import BlockyardError, Reason, Violation, from_rpc_error, invalid
from blockyard.security.authentication import CALLER
from blockyard.service.log_level import check_level, set_log_level
from blockyard.telemetry import EventLogger
from blockyard.version import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from blockyard.service.metrics import Histogram
    from gateway.generation import GenerationService
    from gateway.live.scheduler_link import SchedulerLink

log = EventLogger(__name__)

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
GATEWAY = "gateway"
STATUS_TIMEOUT_SECONDS = 2.0
# A worker has its own time for what it is asked; a profile starts torch's profiler, which loads libraries.
CALL_TIMEOUT_SECONDS = 150.0
# A replica may finish its requests first, or load its weights.
OPERATION_TIMEOUT_SECONDS = 3600.0


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves operators."""

    def __init__(self, generation: GenerationService, link: SchedulerLink, *, gateway_id: str) -> None:
        self._generation = generation
        self._link = link
        self._gateway_id = gateway_id
        self._started_at = time.monotonic()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers it."""
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)

    # This gateway.

    async def GetStatus(  # type: ignore[override]
        self, request: admin_pb2.GetStatusRequest, context: Any
    ) -> admin_pb2.GetStatusResponse:
        """Returns the status of the gateway and the scheduler."""
        return await self.status()

    async def status(self) -> admin_pb2.GetStatusResponse:
        """Returns the same; without the scheduler's part if that does not answer."""
        response = admin_pb2.GetStatusResponse(gateway=self._status())
        try:
            response.scheduler.CopyFrom(await self._link.get_status(STATUS_TIMEOUT_SECONDS))
        except grpc.RpcError as error:
            message = f"the scheduler gives no status: {from_rpc_error(error).message}"
            response.gateway.message = response.gateway.message or message
        return response

    def _status(self) -> admin_pb2.GatewayStatus:
        generation, metrics = self._generation, self._generation.metrics
        return admin_pb2.GatewayStatus(
            gateway_id=self._gateway_id,
            version=__version__,
            ready=generation.is_ready(),
            message=generation.readiness_message,
            num_requests=generation.num_requests,
            draining=generation.is_draining,
            uptime=_duration(time.monotonic() - self._started_at),
            num_readers=generation.num_readers,
            time_to_first_token=_latency(metrics.time_to_first_token),
            inter_token_latency=_latency(metrics.inter_token_latency),
            request_latency=_latency(metrics.request_latency),
        )

    async def DrainGateway(  # type: ignore[override]
        self, request: admin_pb2.DrainGatewayRequest, context: Any
    ) -> admin_pb2.DrainGatewayResponse:
        """Makes the gateway report not ready."""
        _note("DrainGateway")
        self._generation.drain()
        return admin_pb2.DrainGatewayResponse(gateway=self._status())

    async def UndrainGateway(  # type: ignore[override]
        self, request: admin_pb2.UndrainGatewayRequest, context: Any
    ) -> admin_pb2.UndrainGatewayResponse:
        """Makes the gateway report ready again."""
        _note("UndrainGateway")
        self._generation.undrain()
        return admin_pb2.UndrainGatewayResponse(gateway=self._status())

    async def SetLogLevel(  # type: ignore[override]
        self, request: admin_pb2.SetLogLevelRequest, context: Any
    ) -> admin_pb2.SetLogLevelResponse:
        """Sets the log level of this process, of others, or of all."""
        check_level(request.level)
        _note("SetLogLevel", process=request.process or "all")
        response = admin_pb2.SetLogLevelResponse()
        if request.process in ("", GATEWAY):
            response.processes.add(process=GATEWAY, previous_level=set_log_level(request.level))
        if request.process == GATEWAY:
            return response
        try:
            others: admin_pb2.SetLogLevelResponse = await self._ask_scheduler("SetLogLevel", request)
            response.processes.extend(others.processes)
        except BlockyardError as error:
            if request.process:
                raise
            response.processes.add(process="scheduler", message=error.message)
        return response

    # Passed on to the scheduler.

    def _stub(self) -> Any:
        return admin_pb2_grpc.AdminServiceStub(self._link.channel())

    async def _pass_on(self, method: str, request: Any, seconds: float = CALL_TIMEOUT_SECONDS, **fields: str) -> Any:
        _note(method, **fields)
        return await self._ask_scheduler(method, request, seconds)

    async def _ask_scheduler(self, method: str, request: Any, seconds: float = CALL_TIMEOUT_SECONDS) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=seconds)
        except grpc.RpcError as error:
            raise _from_scheduler(error) from None

    async def DrainReplica(  # type: ignore[override]
        self, request: admin_pb2.DrainReplicaRequest, context: Any
    ) -> admin_pb2.DrainReplicaResponse:
        """Stops a replica from taking requests."""
        return await self._pass_on("DrainReplica", request)

    async def UndrainReplica(  # type: ignore[override]
        self, request: admin_pb2.UndrainReplicaRequest, context: Any
    ) -> admin_pb2.UndrainReplicaResponse:
        """Lets a replica take requests again."""
        return await self._pass_on("UndrainReplica", request)

    async def SleepReplica(  # type: ignore[override]
        self, request: admin_pb2.SleepReplicaRequest, context: Any
    ) -> admin_pb2.SleepReplicaResponse:
        """Puts a replica to sleep."""
        return await self._pass_on("SleepReplica", request, OPERATION_TIMEOUT_SECONDS)

    async def WakeReplica(  # type: ignore[override]
        self, request: admin_pb2.WakeReplicaRequest, context: Any
    ) -> admin_pb2.WakeReplicaResponse:
        """Wakes a replica."""
        return await self._pass_on("WakeReplica", request, OPERATION_TIMEOUT_SECONDS)

    async def SaveState(  # type: ignore[override]
        self, request: admin_pb2.SaveStateRequest, context: Any
    ) -> AsyncIterator[admin_pb2.SaveStateResponse]:
        """Has a replica save its weights."""
        _note("SaveState")
        try:
            async for event in self._stub().SaveState(request, timeout=OPERATION_TIMEOUT_SECONDS):
                yield event
        except grpc.RpcError as error:
            raise _from_scheduler(error) from None

    async def ResetPrefixCache(  # type: ignore[override]
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Any
    ) -> admin_pb2.ResetPrefixCacheResponse:
        """Empties the prefix cache."""
        return await self._pass_on("ResetPrefixCache", request)

    async def StartProfile(  # type: ignore[override]
        self, request: admin_pb2.StartProfileRequest, context: Any
    ) -> admin_pb2.StartProfileResponse:
        """Starts the profiler of a worker."""
        return await self._pass_on("StartProfile", request)

    async def StopProfile(  # type: ignore[override]
        self, request: admin_pb2.StopProfileRequest, context: Any
    ) -> AsyncIterator[admin_pb2.StopProfileResponse]:
        """Stops the profiler and streams its profile."""
        async for piece in self._pass_stream("StopProfile", request, CALL_TIMEOUT_SECONDS):
            yield piece

    async def UpdateWeights(  # type: ignore[override]
        self, request: admin_pb2.UpdateWeightsRequest, context: Any
    ) -> AsyncIterator[admin_pb2.UpdateWeightsResponse]:
        """Gives replicas other weights, and streams what happens."""
        async for event in self._pass_stream("UpdateWeights", request, OPERATION_TIMEOUT_SECONDS):
            yield event

    async def _pass_stream(self, method: str, request: Any, seconds: float) -> AsyncIterator[Any]:
        _note(method)
        call = getattr(self._stub(), method)(request, timeout=seconds)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise _from_scheduler(error) from None
        finally:
            call.cancel()

    async def LoadLora(  # type: ignore[override]
        self, request: admin_pb2.LoadLoraRequest, context: Any
    ) -> admin_pb2.LoadLoraResponse:
        """Loads an adapter, under a name that is not the model's."""
        if request.name == self._generation.model_name:
            raise invalid([Violation("name", f"{request.name!r} is the model itself")])
        await self._generation.check_tokenizer(request.name, request.path)
        answer: admin_pb2.LoadLoraResponse = await self._pass_on("LoadLora", request)
        lora_id = answer.lora.lora_id
        await self._hear_of(lambda ids: lora_id in (0, *ids))
        return answer

    async def UnloadLora(  # type: ignore[override]
        self, request: admin_pb2.UnloadLoraRequest, context: Any
    ) -> admin_pb2.UnloadLoraResponse:
        """Unloads an adapter."""
        known = self._link.loras.get(request.name)
        answer = await self._pass_on("UnloadLora", request)
        await self._hear_of(lambda ids: known is None or known.lora_id not in ids)
        return answer

    async def _hear_of(self, is_told: Callable[[set[int]], bool]) -> None:
        """Waits until this gateway was told of a change: whoever asked for it may rely on it here."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
                await self._link.wait_until(lambda: is_told({each.lora_id for each in self._link.loras.values()}))

    async def PinLora(  # type: ignore[override]
        self, request: admin_pb2.PinLoraRequest, context: Any
    ) -> admin_pb2.PinLoraResponse:
        """Pins an adapter, or unpins it."""
        return await self._pass_on("PinLora", request)

    async def ListLoras(  # type: ignore[override]
        self, request: admin_pb2.ListLorasRequest, context: Any
    ) -> admin_pb2.ListLorasResponse:
        """Lists the adapters."""
        return await self._pass_on("ListLoras", request)

    async def InspectModel(  # type: ignore[override]
        self, request: admin_pb2.InspectModelRequest, context: Any
    ) -> admin_pb2.InspectModelResponse:
        """Describes the network of a replica's workers."""
        return await self._pass_on("InspectModel", request)

    async def CallOperation(  # type: ignore[override]
        self, request: admin_pb2.CallOperationRequest, context: Any
    ) -> admin_pb2.CallOperationResponse:
        """Has a replica's workers do one of a closed list of operations."""
        return await self._pass_on("CallOperation", request, operation=request.operation.WhichOneof("kind") or "none")

    async def CallExtension(  # type: ignore[override]
        self, request: admin_pb2.CallExtensionRequest, context: Any
    ) -> admin_pb2.CallExtensionResponse:
        """Has a replica's workers do an operation of an extension."""
        return await self._pass_on("CallExtension", request, operation=f"{request.extension}.{request.operation}")

    async def DumpState(  # type: ignore[override]
        self, request: admin_pb2.DumpStateRequest, context: Any
    ) -> admin_pb2.DumpStateResponse:
        """Returns the scheduler's state."""
        return await self._pass_on("DumpState", request)


def _note(method: str, **fields: str) -> None:
    """Logs who did what to the system."""
    log.info("an operator called", method=method, caller=CALLER.get().name or "unknown", **fields)


def _duration(seconds: float) -> Duration:
    encoded = Duration()
    encoded.FromNanoseconds(int(seconds * 1e9))
    return encoded


def _latency(histogram: Histogram) -> status_pb2.LatencyTotals:
    counts = histogram.counts
    return status_pb2.LatencyTotals(
        count=sum(counts), sum=_duration(histogram.sum), bucket_ends=histogram.bounds, bucket_counts=counts
    )


def _from_scheduler(error: grpc.RpcError) -> BlockyardError:
    """Returns the scheduler's error, or that the scheduler does not answer."""
    decoded = from_rpc_error(error)
    if decoded.reason is not Reason.NO_READY_WORKER or "origin" not in decoded.metadata:
        return decoded
    return BlockyardError(Reason.NO_READY_WORKER, f"the scheduler does not answer: {decoded.message}")
