"""One connection to one worker: its lifecycle calls and its step stream. Does not know the order of the calls.

Every failure leaves here as a BlockyardError: NO_READY_WORKER if no worker answers, a WrongAnswer if the answer is not
possible, or else the worker's own error.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import grpc
import grpc.aio

from blockyard.addresses import with_port
from blockyard.contract.codec import workers
from blockyard.contract.codec.worker_info import COLLECTIVES, decode_worker_info, encode_group_request
from blockyard.contract.workers import GroupRequest, LoadedModel
from blockyard.errors import BlockyardError, Reason, from_rpc_error
from blockyard.service import faults
from blockyard.service.servers import RenewedChannel
from blockyard.transport import GRPC, Transport
from blockyard.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service.replicas import codec
from scheduler_service.replicas.facts import MeetingPoint
from scheduler_service.replicas.steps.answer_checks import (
    WrongAnswer,
    check_blocks,
    check_cache,
    check_model,
    check_turn,
    check_worker,
    require,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Sequence

    from blockyard.common.v1 import administration_pb2
    from blockyard.contract.workers import (
        AvailableBlocks,
        CacheInfo,
        CachePlan,
        DeviceRequest,
        LoadProgress,
        LoadRequest,
        ProfileRequest,
        WeightsSource,
        WorkerInfo,
    )
    from blockyard.security.tls import Peer
    from scheduler_service.core.values import SchedulerOutput, StepResult
    from scheduler_service.replicas.steps.answer_checks import AnswerLimits

_PLANNED = ("block_size", "num_device_blocks", "num_host_blocks", "max_model_len")
INFO_SECONDS = 5.0
DEVICE_SECONDS = 120.0
# Profiling and warm-up compile kernels; a dead worker is noticed by keepalive long before.
SETUP_SECONDS = 1800.0
_EXECUTE_MODEL = f"/{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}/ExecuteModel"
_EOF: Any = getattr(grpc.aio, "EOF")  # noqa: B009 - the stubs lack it


Message = TypeVar("Message")


@contextmanager
def _translated() -> Generator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        translated = from_rpc_error(error)
        if translated.reason is Reason.MESSAGE_TOO_LARGE:
            raise WrongAnswer(translated.message) from None
        raise translated from None


def _read(message: Message | None) -> Message:
    """Returns a message; raises WrongAnswer for None, which gRPC gives for what it cannot parse."""
    if message is None:
        raise WrongAnswer("it is not a message of the protocol")
    return message


class StepCall:
    """The call with one epoch's steps for one worker: takes steps as bytes, returns answers as messages."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, step: bytes) -> None:
        """Sends one step; returns when it is on its way. Raises BlockyardError when the stream is broken."""
        try:
            with _translated():
                await self._call.write(step)
        except asyncio.InvalidStateError:
            raise _make_broken_error("the step stream has ended") from None

    async def read(self) -> worker_pb2.ExecuteModelResponse:
        """Waits for the next answer. Raises BlockyardError when the stream is broken; DRAINING when the worker stops:
        the steps that are not answered by then are not run."""
        with _translated():
            message = await self._call.read()
        if message is _EOF:
            raise _make_broken_error("the worker ended the step stream")
        message = _read(message)
        if message.draining:
            raise BlockyardError(Reason.DRAINING, "the worker is stopping")
        return message

    def cancel(self) -> None:
        self._call.cancel()


def _make_broken_error(message: str) -> BlockyardError:
    return BlockyardError(Reason.NO_READY_WORKER, message)


class Steps(Protocol):
    """The steps of one epoch, to all workers of a replica. One task sends, another receives; answers come in the order
    of the steps.

    `step_seconds`: how long the workers were busy with the step that was answered last. `encode_seconds`: how long it
    took to make a message of the step that was sent last.
    """

    epoch: int
    step_seconds: float
    encode_seconds: float

    async def send(self, output: SchedulerOutput) -> None:
        """Sends one step; returns when it is on its way. Raises BlockyardError when the stream is broken."""

    async def receive(self) -> StepResult:
        """Waits for the next answer. Raises BlockyardError when the stream is broken, a step was refused or the answer
        is wrong; DRAINING when a worker stops."""
        ...

    def cancel(self) -> None: ...


class StepStream:
    """The steps of one epoch, to the one worker of a replica; see `Steps`."""

    def __init__(self, call: StepCall, epoch: int, limits: AnswerLimits) -> None:
        self.epoch = epoch
        self.step_seconds = 0.0
        self.encode_seconds = 0.0
        self._call = call
        self._limits = limits
        self._last_answered = 0

    async def send(self, output: SchedulerOutput) -> None:
        faults.reach(faults.BEFORE_SEND)
        now = asyncio.get_running_loop().time
        begin = now()
        step = codec.encode_step(output, self.epoch).SerializeToString()
        self.encode_seconds = now() - begin
        await self._call.write(step)
        faults.reach(faults.AFTER_SEND)

    async def receive(self) -> StepResult:
        message = await self._call.read()
        result = codec.decode_answer(message, self._limits)
        check_turn(message.epoch, result.step_id, self.epoch, self._last_answered + 1)
        self._last_answered = result.step_id
        self.step_seconds = result.forward_seconds + result.cache_seconds
        return result

    def cancel(self) -> None:
        self._call.cancel()


class WorkerLink:
    """The connection to the worker at `address`, which reconnects for ever, at least once a second."""

    def __init__(self, address: str, peer: Peer | None = None, transport: Transport = GRPC) -> None:
        self.address = address
        self._channel = RenewedChannel(address, peer, transport)

    @property
    def _stub(self) -> worker_pb2_grpc.WorkerServiceAsyncStub:
        return worker_pb2_grpc.WorkerServiceStub(self._channel.get())

    async def info(self) -> WorkerInfo:
        """Asks for the worker's identity and state. Raises NO_READY_WORKER if no worker answers in time."""
        try:
            message = await self._stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest(), timeout=INFO_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise BlockyardError(Reason.NO_READY_WORKER, "the worker does not answer") from None
            raise from_rpc_error(error) from None
        return check_worker(decode_worker_info(_read(message)))

    async def init_device(self, request: DeviceRequest) -> None:
        with _translated():
            await self._stub.InitDevice(workers.encode_device_request(request), timeout=DEVICE_SECONDS)

    async def load_model(self, request: LoadRequest) -> AsyncIterator[LoadProgress | LoadedModel]:
        """Makes the worker load the weights: yields progress, then once the loaded model."""
        with _translated():
            async for message in self._stub.LoadModel(workers.encode_load_request(request)):
                event = workers.decode_load_event(_read(message))
                yield check_model(event) if isinstance(event, LoadedModel) else event

    async def determine_num_available_blocks(self, request: ProfileRequest) -> AvailableBlocks:
        """Asks how many blocks fit beside a step of this size."""
        asked = workers.PROFILE_REQUEST.encode(request)
        with _translated():
            message = await self._stub.DetermineNumAvailableBlocks(asked, timeout=SETUP_SECONDS)
        return check_blocks(workers.AVAILABLE_BLOCKS.decode(_read(message)))

    async def initialize_cache(self, plan: CachePlan) -> CacheInfo:
        with _translated():
            message = await self._stub.InitializeCache(workers.CACHE_PLAN.encode(plan), timeout=SETUP_SECONDS)
        cache = check_cache(workers.CACHE_INFO.decode(_read(message).cache))
        wrong = [name for name in _PLANNED if getattr(cache, name) != getattr(plan, name)]
        require(not wrong, f"the cache was not made as planned: {', '.join(wrong)} differ")
        return cache

    async def open_rendezvous(self, epoch: int, members: Sequence[str]) -> MeetingPoint:
        """Makes the worker of rank 0 open the meeting point of a group."""
        request = worker_pb2.OpenRendezvousRequest(epoch=epoch, members=members)
        with _translated():
            answer = _read(await self._stub.OpenRendezvous(request, timeout=INFO_SECONDS))
        require(answer.port < 2**16, f"port {answer.port} is out of range")
        address = with_port(self.address, answer.port) if answer.port else self.address
        return MeetingPoint(address, answer.secret)

    async def form_group(
        self, epoch: int, members: Sequence[str], timeout_seconds: float, meeting: MeetingPoint | None
    ) -> str:
        """Makes the worker join a group; without a meeting point, the present group is taken over.

        Returns how its ranks reach each other.
        """
        address, secret = (meeting.address, meeting.secret) if meeting else ("", b"")
        request = GroupRequest(epoch, address, secret, tuple(members), timeout_seconds, reuse=meeting is None)
        with _translated():
            answer = await self._stub.FormGroup(encode_group_request(request), timeout=timeout_seconds + INFO_SECONDS)
        return COLLECTIVES.decode(_read(answer).kind)

    async def leave_group(self, epoch: int, reason: str) -> None:
        with _translated():
            await self._stub.LeaveGroup(worker_pb2.LeaveGroupRequest(epoch=epoch, reason=reason), timeout=INFO_SECONDS)

    async def reload_weights(self, source: WeightsSource) -> None:
        async for _ in self.stream("ReloadWeights", workers.WEIGHTS_SOURCE.encode(source)):
            pass

    async def call(self, method: str, request: Any, seconds: float) -> Any:
        with _translated():
            return _read(await getattr(self._stub, method)(request, timeout=seconds))

    async def stream(self, method: str, request: Any) -> AsyncIterator[Any]:
        with _translated():
            async for message in getattr(self._stub, method)(request):
                yield _read(message)

    async def shutdown(self, reason: str) -> None:
        with _translated():
            await self._stub.Shutdown(worker_pb2.ShutdownRequest(reason=reason), timeout=INFO_SECONDS)

    async def set_log_level(
        self, level: administration_pb2.LogLevel.ValueType
    ) -> administration_pb2.LogLevel.ValueType:
        """Changes the worker's log level, and returns the previous one."""
        with _translated():
            answer = await self._stub.SetLogLevel(worker_pb2.SetLogLevelRequest(level=level), timeout=INFO_SECONDS)
        return _read(answer).previous_level

    async def start_profile(self, options: administration_pb2.ProfileOptions) -> administration_pb2.ProfileOptions:
        with _translated():
            request = worker_pb2.StartProfileRequest(options=options)
            answer = await self._stub.StartProfile(request, timeout=DEVICE_SECONDS)
        return _read(answer).options

    async def stop_profile(self) -> AsyncIterator[worker_pb2.StopProfileResponse]:
        with _translated():
            async for message in self._stub.StopProfile(worker_pb2.StopProfileRequest()):
                yield _read(message)

    def open_steps(self) -> StepCall:
        """Opens the step stream of an epoch, which its first step names."""
        # The stub's own serializer would encode a step once for each rank.
        execute_model: Any = self._channel.get().stream_stream(
            _EXECUTE_MODEL, request_serializer=None, response_deserializer=worker_pb2.ExecuteModelResponse.FromString
        )
        return StepCall(execute_model())

    async def close(self) -> None:
        await self._channel.close()
