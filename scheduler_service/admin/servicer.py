"""Answers AdminService, for operators: about the scheduler itself and about its workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from blockyard.admin.v1 import admin_pb2, admin_pb2_grpc
from blockyard.contract.codec.messages import decode_seconds, encode_seconds
from blockyard.contract.codec.workers import decode_known_tags, encode_tags
from blockyard.contract.diagnostics import DEFAULT_SECONDS, MAX_SECONDS
from blockyard.errors import BlockyardError, Reason, Violation, invalid, quote
from blockyard.service.log_level import check_level, set_log_level
from blockyard.telemetry import EventLogger
from blockyard.worker.v1 import worker_pb2
from scheduler_service.admin.operations_codec import (
    decode_mode,
    decode_save,
    decode_update,
    encode_save_progress,
    encode_saved,
    encode_update_event,
)
from scheduler_service.admin.state_dump_codec import encode_state
from scheduler_service.admin.status_codec import encode_lora, encode_replica, encode_status
from scheduler_service.operations import updates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from blockyard.common.v1 import administration_pb2
    from scheduler_service.operations.operations_link import SaveProgress
    from scheduler_service.replicas.engine import Engine
    from scheduler_service.replicas.rank import Rank
    from scheduler_service.service import SchedulerService


log = EventLogger(__name__)

# A worker reports a timeout itself, since it knows whether the operation had begun.
GRACE_SECONDS = 1.0


async def ask_each(ranks: Sequence[Rank], method: str, request: Any, seconds: float) -> list[Any]:
    """Asks all of them by the same call, and returns their answers by rank.

    Raises:
        BlockyardError: OPERATION_DEADLINE, which names the ranks that did not answer in time; else the error of the
            first rank that has one, which it names too.
    """
    calls = (rank.link.call(method, request, seconds + 2 * GRACE_SECONDS) for rank in ranks)
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        await asyncio.wait(tasks, timeout=seconds + GRACE_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
    failures = {rank: error for rank, task in zip(ranks, tasks, strict=True) if (error := _failure(task)) is not None}
    late = [rank for rank, error in failures.items() if error.reason is Reason.OPERATION_DEADLINE]
    if late:
        names = " and ".join(f"{rank.parallel.rank} ({rank.address})" for rank in late)
        raise BlockyardError(Reason.OPERATION_DEADLINE, f"no answer within {seconds:g} s of rank {names}")
    for rank, error in failures.items():
        message = error.message if len(ranks) == 1 else f"rank {rank.parallel.rank} ({rank.address}): {error.message}"
        raise BlockyardError(error.reason, message, error.violations, error.retry_after_seconds, error.metadata)
    return [task.result() for task in tasks]


def _failure(task: asyncio.Future[Any]) -> BlockyardError | None:
    if not task.done() or task.cancelled():
        return BlockyardError(Reason.OPERATION_DEADLINE, "no answer")
    error = task.exception()
    if error is None or isinstance(error, BlockyardError):
        return error
    raise error


SCHEDULER = "scheduler"

DEFAULT_MAX_REQUESTS = 1000

DEFAULT_LEVEL = 1


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """The scheduler, for operators. RPCs about gateways are refused."""

    def __init__(self, service: SchedulerService) -> None:
        self._service = service

    def _find(self, name: str) -> Engine:
        """Finds a replica by name; raises BlockyardError FIELD_INVALID, which lists all replicas."""
        engines = self._service.engines
        found = [engine for engine in engines if not name or name in _names(engine)]
        if len(found) == 1:
            return found[0]
        there = ", ".join(f"{engine.replica_id} ({engine.replica.address})" for engine in engines) or "none"
        problem = "must name one of several replicas" if found else f"there is no replica {quote(name)}"
        raise invalid([Violation("replica", f"{problem}; there are: {there}")])

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> Any:
        """Returns the scheduler's status, and no gateway's."""
        return admin_pb2.GetStatusResponse(scheduler=encode_status(self._service))

    async def DrainReplica(self, request: admin_pb2.DrainReplicaRequest, context: Any) -> Any:
        engine, dispatcher = self._find(request.replica), self._service.dispatcher
        hands_over = dispatcher.serves_without(engine)
        if not engine.drain.is_wanted:
            log.info("draining a replica", replica_id=engine.replica_id, hands_over=hands_over)
            engine.drain.begin()
            dispatcher.on_readiness_changed(engine)
        return admin_pb2.DrainReplicaResponse(replica=encode_replica(engine), hands_over=hands_over)

    async def UndrainReplica(self, request: admin_pb2.UndrainReplicaRequest, context: Any) -> Any:
        engine = self._find(request.replica)
        if engine.sleep_level:
            raise BlockyardError(Reason.WRONG_STATE, f"replica {engine.replica_id} is asleep: wake it up")
        if engine.drain.is_wanted:
            log.info("a replica is drained no more", replica_id=engine.replica_id)
            engine.drain.end()
            self._service.dispatcher.on_readiness_changed(engine)
        return admin_pb2.UndrainReplicaResponse(replica=encode_replica(engine))

    async def SleepReplica(self, request: admin_pb2.SleepReplicaRequest, context: Any) -> Any:
        engine, mode = self._find(request.replica), decode_mode(request.mode)
        uses = await self._service.operations.sleep(engine, request.level or DEFAULT_LEVEL, mode)
        return admin_pb2.SleepReplicaResponse(
            replica=encode_replica(engine),
            freed_bytes=sum(use.freed_bytes for use in uses),
            used_bytes=sum(use.used_bytes for use in uses),
        )

    async def WakeReplica(self, request: admin_pb2.WakeReplicaRequest, context: Any) -> Any:
        engine, tags = self._find(request.replica), decode_known_tags(request.tags)
        awake = await self._service.operations.wake(engine, tags, reload=request.reload)
        return admin_pb2.WakeReplicaResponse(
            replica=encode_replica(engine),
            asleep_tags=encode_tags(awake.asleep),
            weights_are_stale=awake.is_stale,
        )

    async def UpdateWeights(self, request: admin_pb2.UpdateWeightsRequest, context: Any) -> AsyncIterator[Any]:
        engines = [self._find(name) for name in dict.fromkeys(request.replicas)] or list(self._service.engines)
        async for event in updates.update(self._service.operations, engines, decode_update(request)):
            yield encode_update_event(event)

    async def SaveState(self, request: admin_pb2.SaveStateRequest, context: Any) -> AsyncIterator[Any]:
        what, mode = decode_save(request), decode_mode(request.mode)
        events: asyncio.Queue[SaveProgress | None] = asyncio.Queue()
        work = self._service.operations.save(self._find(request.replica), what, mode, events.put_nowait)
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (progress := await events.get()) is not None:
                yield encode_save_progress(progress)
            yield encode_saved(task.result())
        finally:
            task.cancel()

    async def ResetPrefixCache(self, request: admin_pb2.ResetPrefixCacheRequest, context: Any) -> Any:
        engines = [self._find(request.replica)] if request.replica else self._service.engines
        return admin_pb2.ResetPrefixCacheResponse(replicas=[reset for each in engines if (reset := _reset(each))])

    async def SetLogLevel(self, request: admin_pb2.SetLogLevelRequest, context: Any) -> Any:
        """Changes the log level of this process or of workers."""
        check_level(request.level)
        response = admin_pb2.SetLogLevelResponse()
        if request.process in ("", SCHEDULER):
            response.processes.add(process=SCHEDULER, previous_level=set_log_level(request.level))
        if request.process != SCHEDULER:
            engines = [self._find(request.process)] if request.process else self._service.engines
            ranks = [rank for engine in engines for rank in _find_ranks(engine, request.process)]
            changes = (_set_worker_log_level(rank, request.level) for rank in ranks)
            response.processes.extend(await asyncio.gather(*changes))
        return response

    async def StartProfile(self, request: admin_pb2.StartProfileRequest, context: Any) -> Any:
        engine = self._find(request.replica)
        options = await _find_ranks(engine, request.replica)[0].link.start_profile(request.options)
        log.info("profiling a worker", replica_id=engine.replica_id, max_steps=options.max_steps)
        return admin_pb2.StartProfileResponse(replica_id=engine.replica_id, options=options)

    async def StopProfile(self, request: admin_pb2.StopProfileRequest, context: Any) -> AsyncIterator[Any]:
        engine = self._find(request.replica)
        async for piece in _find_ranks(engine, request.replica)[0].link.stop_profile():
            summary = piece.summary if piece.HasField("summary") else None
            yield admin_pb2.StopProfileResponse(summary=summary, data=piece.data)

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Any) -> Any:
        adapter = await self._service.loras.load(request.name, request.path, load_inplace=request.load_inplace)
        return admin_pb2.LoadLoraResponse(lora=encode_lora(adapter, self._service.engines))

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Any) -> Any:
        self._service.loras.unload(request.name)
        return admin_pb2.UnloadLoraResponse()

    async def PinLora(self, request: admin_pb2.PinLoraRequest, context: Any) -> Any:
        adapter = await self._service.loras.pin(request.name, pinned=request.pinned)
        return admin_pb2.PinLoraResponse(lora=encode_lora(adapter, self._service.engines))

    async def ListLoras(self, request: admin_pb2.ListLorasRequest, context: Any) -> Any:
        named = self._service.loras.registry.named
        return admin_pb2.ListLorasResponse(loras=[encode_lora(each, self._service.engines) for each in named])

    async def CallExtension(self, request: admin_pb2.CallExtensionRequest, context: Any) -> Any:
        engine = self._find(request.replica)
        ranks, seconds = _find_ranks(engine, request.replica), _decode_timeout(request)
        names = {"extension": request.extension, "operation": request.operation}
        asked = worker_pb2.CallExtensionRequest(**names, payload=request.payload, timeout=encode_seconds(seconds))
        response = admin_pb2.CallExtensionResponse(replica_id=engine.replica_id)
        for rank, answer in zip(ranks, await ask_each(ranks, "CallExtension", asked, seconds), strict=True):
            response.results.add(rank=rank.parallel.rank, address=rank.address, result=answer.result)
        return response

    async def DumpState(self, request: admin_pb2.DumpStateRequest, context: Any) -> Any:
        max_requests = request.max_requests or DEFAULT_MAX_REQUESTS
        return admin_pb2.DumpStateResponse(state=encode_state(self._service, max_requests))

    async def DrainGateway(self, request: admin_pb2.DrainGatewayRequest, context: Any) -> Any:
        raise _make_not_here_error()

    async def UndrainGateway(self, request: admin_pb2.UndrainGatewayRequest, context: Any) -> Any:
        raise _make_not_here_error()

    async def ListMisses(self, request: admin_pb2.ListMissesRequest, context: Any) -> Any:
        raise _make_not_here_error()


def _decode_timeout(request: admin_pb2.CallExtensionRequest) -> float:
    """Decodes how long workers may take, in seconds; raises BlockyardError FIELD_INVALID."""
    seconds = decode_seconds(request, "timeout")
    if seconds is None:
        return DEFAULT_SECONDS
    if not 0 < seconds <= MAX_SECONDS:
        raise invalid([Violation("timeout", f"must be above 0 and at most {MAX_SECONDS:g} s")])
    return seconds


def _names(engine: Engine) -> set[str]:
    return {str(engine.replica_id), engine.replica.address}.union(*map(_names_of_rank, engine.replica.ranks))


def _names_of_rank(rank: Rank) -> set[str]:
    return {rank.address, rank.incarnation, rank.worker.worker_id if rank.worker else ""} - {""}


def _find_ranks(engine: Engine, name: str) -> list[Rank]:
    """Finds the workers that a name means: one of them, or all (by rank) if it names the replica."""
    return [rank for rank in engine.replica.ranks if name in _names_of_rank(rank)] or engine.replica.ranks


async def _set_worker_log_level(rank: Rank, level: administration_pb2.LogLevel.ValueType) -> admin_pb2.ProcessLogLevel:
    process = admin_pb2.ProcessLogLevel(process=rank.address)
    try:
        process.previous_level = await rank.link.set_log_level(level)
    except BlockyardError as error:
        process.message = error.message
    return process


def _reset(engine: Engine) -> admin_pb2.PrefixCacheReset | None:
    if engine.scheduler is None:
        return None
    reset = engine.scheduler.reset_prefix_cache()
    log.info("the prefix cache was reset", replica_id=engine.replica_id, kept=reset.num_kept_device_blocks)
    return admin_pb2.PrefixCacheReset(
        replica_id=engine.replica_id,
        num_forgotten_device_blocks=reset.num_forgotten_device_blocks,
        num_forgotten_host_blocks=reset.num_forgotten_host_blocks,
        num_kept_device_blocks=reset.num_kept_device_blocks,
        num_kept_host_blocks=reset.num_kept_host_blocks,
    )


def _make_not_here_error() -> BlockyardError:
    return BlockyardError(Reason.FEATURE_DISABLED, "the scheduler does not answer this call: send it to a gateway")
