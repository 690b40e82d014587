"""Answers AdminService: status, draining and log level of this gateway. Forwards all other calls to the scheduler."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.common.v1 import status_pb2
from blockyard.contract.codec.messages import encode_seconds
from blockyard.errors import BlockyardError, Reason, Violation, from_rpc_error, invalid
from blockyard.headers import MODEL_KEY
from blockyard.security.authentication import CALLER
from blockyard.service.log_level import check_level, set_log_level
from blockyard.telemetry import EventLogger
from blockyard.version import __version__
from gateway.fronts.grpc_api.misses import list_misses

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from blockyard.service.metrics import Histogram
    from gateway.generation import GenerationService
    from gateway.live.scheduler_link import SchedulerLink
    from gateway.served_model import ServedModel

log = EventLogger(__name__)

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
GATEWAY = "gateway"
STATUS_TIMEOUT_SECONDS = 2.0
# The scheduler has its own time limits for workers. Starting a profile takes long: torch's profiler loads libraries.
CALL_TIMEOUT_SECONDS = 150.0
# These operations may wait for running requests or load weights.
OPERATION_TIMEOUT_SECONDS = 3600.0
_SECONDS: dict[str, float] = dict.fromkeys(
    ("SleepReplica", "WakeReplica", "SaveState", "UpdateWeights"), OPERATION_TIMEOUT_SECONDS
)


def _passed_on(method: str) -> Any:
    """Makes a servicer method that forwards a call to the scheduler, which answers with one message."""

    async def pass_on(self: AdminServicer, request: Any, context: Any) -> Any:
        return await self.pass_on(method, request, model_name_of(context))

    return pass_on


def _passed_on_stream(method: str) -> Any:
    """Makes a servicer method that forwards a call to the scheduler, which answers with a stream."""

    async def pass_on(self: AdminServicer, request: Any, context: Any) -> AsyncIterator[Any]:
        _note(method)
        call = _call(self._link_of(model_name_of(context)), method, request)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise _from_scheduler(error) from None
        finally:
            call.cancel()

    return pass_on


def model_name_of(context: Any) -> str:
    """Returns the name of the model that an operator's call is for; empty: the gateway's first model."""
    return dict(context.invocation_metadata() or ()).get(MODEL_KEY, "")


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Answers operators.

    Args:
        generation: the core that all fronts use.
        gateway_id: a random id of this process.
        shows_prompt_text: whether ListMisses shows clients' text.
    """

    def __init__(self, generation: GenerationService, *, gateway_id: str, shows_prompt_text: bool = False) -> None:
        self._generation = generation
        self._shows_prompt_text = shows_prompt_text
        self._gateway_id = gateway_id
        self._started_at = generation.clock.monotonic()

    def add_to(self, server: grpc.aio.Server) -> None:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)

    # Calls that this gateway answers.

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> Any:
        return await self.status(model_name_of(context))

    async def status(self, model_name: str = "") -> admin_pb2.GetStatusResponse:
        """Returns the answer of GetStatus; without the scheduler's part if the model's scheduler does not answer."""
        response = admin_pb2.GetStatusResponse(gateway=self._status())
        for model in self._generation.served_models:
            response.models.add(
                name=model.name,
                ready=model.link.is_ready,
                message=model.message,
                num_requests=model.num_requests,
                num_waiting_requests=model.num_waiting_here,
                num_started_requests=model.live.num_started,
                state=admin_pb2.ModelState.ValueType(model.state),
                starts_on_demand=model.starts_on_demand,
            )
        shown = self._model_of(model_name)
        if shown.starts_on_demand and not shown.link.is_attached:
            response.gateway.message = response.gateway.message or shown.message
            return response
        try:
            response.scheduler.CopyFrom(await shown.link.get_status(STATUS_TIMEOUT_SECONDS))
        except grpc.RpcError as error:
            message = f"the scheduler did not report its status: {from_rpc_error(error).message}"
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
            uptime=encode_seconds(generation.clock.monotonic() - self._started_at),
            num_readers=generation.num_readers,
            time_to_first_token=_latency(metrics.time_to_first_token),
            inter_token_latency=_latency(metrics.inter_token_latency),
            request_latency=_latency(metrics.request_latency),
        )

    async def DrainGateway(self, request: admin_pb2.DrainGatewayRequest, context: Any) -> Any:
        """Makes the gateway report not ready."""
        _note("DrainGateway")
        self._generation.drain()
        return admin_pb2.DrainGatewayResponse(gateway=self._status())

    async def UndrainGateway(self, request: admin_pb2.UndrainGatewayRequest, context: Any) -> Any:
        """Makes the gateway report ready again."""
        _note("UndrainGateway")
        self._generation.undrain()
        return admin_pb2.UndrainGatewayResponse(gateway=self._status())

    async def ListMisses(self, request: admin_pb2.ListMissesRequest, context: Any) -> Any:
        model = self._model_of(model_name_of(context))
        _note("ListMisses")
        return await list_misses(model, request, shows_text=self._shows_prompt_text)

    async def SetLogLevel(self, request: admin_pb2.SetLogLevelRequest, context: Any) -> Any:
        check_level(request.level)
        _note("SetLogLevel", process=request.process or "all")
        response = admin_pb2.SetLogLevelResponse()
        if request.process in ("", GATEWAY):
            response.processes.add(process=GATEWAY, previous_level=set_log_level(request.level))
        if request.process == GATEWAY:
            return response
        try:
            link = self._link_of(model_name_of(context))
            others: admin_pb2.SetLogLevelResponse = await _ask(link, "SetLogLevel", request)
            response.processes.extend(others.processes)
        except BlockyardError as error:
            if request.process:
                raise
            response.processes.add(process="scheduler", message=error.message)
        return response

    # Calls that are forwarded to the scheduler.

    DrainReplica = _passed_on("DrainReplica")
    UndrainReplica = _passed_on("UndrainReplica")
    SleepReplica = _passed_on("SleepReplica")
    WakeReplica = _passed_on("WakeReplica")
    ResetPrefixCache = _passed_on("ResetPrefixCache")
    StartProfile = _passed_on("StartProfile")
    PinLora = _passed_on("PinLora")
    ListLoras = _passed_on("ListLoras")
    DumpState = _passed_on("DumpState")
    SaveState = _passed_on_stream("SaveState")
    StopProfile = _passed_on_stream("StopProfile")
    UpdateWeights = _passed_on_stream("UpdateWeights")

    async def pass_on(self, method: str, request: Any, model_name: str, **fields: str) -> Any:
        """Logs a call and returns the answer of the model's scheduler; raises its error as a BlockyardError."""
        _note(method, **fields)
        return await _ask(self._link_of(model_name), method, request)

    def _model_of(self, model_name: str) -> ServedModel:
        """Returns the model that a call is for; raises BlockyardError MODEL_NOT_FOUND."""
        self._generation.resolve_model(model_name)
        return self._generation.model_of(model_name)

    def _link_of(self, model_name: str) -> SchedulerLink:
        return self._model_of(model_name).link

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Any) -> Any:
        return await self.load_lora(request, model_name_of(context))

    async def load_lora(self, request: admin_pb2.LoadLoraRequest, model_name: str = "") -> admin_pb2.LoadLoraResponse:
        """Loads an adapter of a model; raises BlockyardError if its name is that of a model."""
        if any(request.name == model.name for model in self._generation.served_models):
            raise invalid([Violation("name", f"must not be the name of a model itself, {request.name!r}")])
        link = self._link_of(model_name)
        await self._model_of(model_name).check_tokenizer(request.name, request.path)
        answer: admin_pb2.LoadLoraResponse = await self.pass_on("LoadLora", request, model_name)
        lora_id = answer.lora.lora_id
        await _hear_of(link, lambda ids: lora_id in (0, *ids))
        return answer

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Any) -> Any:
        return await self.unload_lora(request, model_name_of(context))

    async def unload_lora(
        self, request: admin_pb2.UnloadLoraRequest, model_name: str = ""
    ) -> admin_pb2.UnloadLoraResponse:
        link = self._link_of(model_name)
        known = link.loras.get(request.name)
        answer = await self.pass_on("UnloadLora", request, model_name)
        await _hear_of(link, lambda ids: known is None or known.lora_id not in ids)
        return answer

    async def CallExtension(self, request: admin_pb2.CallExtensionRequest, context: Any) -> Any:
        operation = f"{request.extension}.{request.operation}"
        return await self.pass_on("CallExtension", request, model_name_of(context), operation=operation)


async def _ask(link: SchedulerLink, method: str, request: Any) -> Any:
    """Returns a scheduler's answer; raises its error as a BlockyardError."""
    try:
        return await _call(link, method, request)
    except grpc.RpcError as error:
        raise _from_scheduler(error) from None


def _call(link: SchedulerLink, method: str, request: Any) -> Any:
    stub = admin_pb2_grpc.AdminServiceStub(link.channel())
    return getattr(stub, method)(request, timeout=_SECONDS.get(method, CALL_TIMEOUT_SECONDS))


async def _hear_of(link: SchedulerLink, is_told: Callable[[set[int]], bool]) -> None:
    """Waits briefly until this gateway has received a change of adapters, so that the caller can rely on it.

    `is_told`: returns whether the change has arrived, from the ids of the known adapters.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(STATUS_TIMEOUT_SECONDS):
            await link.wait_until(lambda: is_told({each.lora_id for each in link.loras.values()}))


def _note(method: str, **fields: str) -> None:
    log.info("an operator called", method=method, caller=CALLER.get().name or "unknown", **fields)


def _latency(histogram: Histogram) -> status_pb2.LatencyTotals:
    counts = histogram.counts
    return status_pb2.LatencyTotals(
        count=sum(counts), sum=encode_seconds(histogram.sum), bucket_ends=histogram.bounds, bucket_counts=counts
    )


def _from_scheduler(error: grpc.RpcError) -> BlockyardError:
    """Returns the scheduler's error, or NO_READY_WORKER if the scheduler does not answer."""
    decoded = from_rpc_error(error)
    if decoded.reason is not Reason.NO_READY_WORKER or "origin" not in decoded.metadata:
        return decoded
    return BlockyardError(Reason.NO_READY_WORKER, f"the scheduler does not answer: {decoded.message}")
