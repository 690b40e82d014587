"""Encodes answers to `GetStatus`, `GetSchedulerStatus` and `ListLoras` from the counts of engines and schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.admin.v1 import admin_pb2
from blockyard.common.v1 import status_pb2
from blockyard.contract.codec.messages import encode_seconds
from blockyard.contract.codec.worker_info import STATES
from blockyard.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blockyard.contract.scheduling import Adapter, Readiness
    from blockyard.contract.workers import WorkerInfo
    from scheduler_service.core.values import SchedulerStats
    from scheduler_service.replicas.engine import Engine
    from scheduler_service.replicas.rank import Rank
    from scheduler_service.requests.failure_history import RecoveryRecord
    from scheduler_service.service import SchedulerService


def encode_status(service: SchedulerService) -> status_pb2.SchedulerStatus:
    stats, dispatcher, now = service.stats(), service.dispatcher, service.now
    running_loras, waiting_loras = service.loras.find_in_use()
    return status_pb2.SchedulerStatus(
        replicas=map(encode_replica, service.engines),
        num_gateways=len(service.requests.outboxes),
        num_waiting_requests=len(service.backlog) + sum(each.num_waiting for each in stats),
        num_preemptions=sum(each.num_preemptions_total for each in stats),
        num_cached_tokens=sum(each.num_cached_tokens_total for each in stats),
        num_prompt_tokens=sum(each.num_prompt_tokens_total for each in stats),
        num_completion_tokens=sum(each.num_completion_tokens_total for each in stats),
        num_recoveries=dispatcher.recovery_log.num_recoveries,
        num_replayed_tokens=dispatcher.recovery_log.num_replayed_tokens,
        version=__version__,
        uptime=encode_seconds(service.uptime_seconds),
        num_waiting_tokens=service.backlog.num_tokens,
        num_requests=len(service.requests.live),
        recoveries=[_encode_recovery(record, now) for record in dispatcher.recovery_log.latest],
        max_loras=service.loras.max_loras,
        running_loras=running_loras,
        waiting_loras=waiting_loras,
    )


def _encode_recovery(record: RecoveryRecord, now: float) -> status_pb2.RecoveryStatus:
    return status_pb2.RecoveryStatus(
        replica_id=record.replica_id,
        age=encode_seconds(max(0.0, now - record.at)),
        cause=record.cause,
        num_requests=record.num_requests,
        num_replayed_tokens=record.num_tokens,
    )


def encode_replica(engine: Engine) -> status_pb2.ReplicaStatus:
    replica = status_pb2.ReplicaStatus(
        replica_id=engine.replica_id,
        ready=engine.is_ready,
        epoch=engine.replica.epoch,
        step_id=engine.step_loop.last_step_id,
        workers=[_encode_worker(rank, engine.readiness) for rank in engine.replica.ranks],
        num_recomputed_sequences=engine.step_loop.step_log.num_recomputed_sequences,
        drain_state=_drain_state(engine),
        left_aside=engine.breaker.is_left_aside,
        weights_version=engine.facts.weights_version if engine.facts else "",
        num_steps=engine.step_loop.step_log.num_steps,
        step_time=encode_seconds(engine.step_loop.step_log.step_seconds),
    )
    if engine.scheduler is not None:
        config = engine.scheduler.config
        replica.block_size = config.block_size
        if config.enable_prefix_caching:
            replica.num_queried_tokens = engine.scheduler.stats().num_queried_tokens_total
        _encode_stats(replica, engine.scheduler.stats())
    return replica


def _drain_state(engine: Engine) -> status_pb2.DrainState.ValueType:
    if engine.drain.is_done:
        return status_pb2.DRAIN_STATE_DRAINED
    return status_pb2.DRAIN_STATE_DRAINING if engine.drain.is_wanted else status_pb2.DRAIN_STATE_UNSPECIFIED


def _encode_stats(replica: status_pb2.ReplicaStatus, stats: SchedulerStats) -> None:
    replica.device_blocks.num_blocks = stats.num_device_blocks
    replica.device_blocks.num_free_blocks = stats.num_free_device_blocks
    replica.device_blocks.num_cached_blocks = stats.num_cached_device_blocks
    replica.host_blocks.num_blocks = stats.num_host_blocks
    replica.host_blocks.num_free_blocks = stats.num_free_host_blocks
    replica.host_blocks.num_cached_blocks = stats.num_cached_host_blocks
    replica.num_waiting_sequences = stats.num_waiting
    replica.num_running_sequences = stats.num_running
    replica.num_swapped_sequences = stats.num_swapped
    replica.num_steps_in_flight = stats.num_steps_in_flight
    replica.num_prefill_pieces = stats.num_prefill_pieces_total
    replica.num_swapped_out_blocks = stats.num_swapped_out_blocks_total
    replica.num_swapped_in_blocks = stats.num_swapped_in_blocks_total
    replica.num_copied_blocks = stats.num_copied_blocks_total
    replica.num_given_back_blocks = stats.num_given_back_blocks_total
    replica.num_draft_tokens = stats.num_draft_tokens_total
    replica.num_accepted_tokens = stats.num_accepted_tokens_total
    replica.num_prompt_tokens = stats.num_prompt_tokens_total
    replica.num_cached_tokens = stats.num_cached_tokens_total
    replica.num_completion_tokens = stats.num_completion_tokens_total
    replica.num_preemptions = stats.num_preemptions_total


def _find_message(rank: Rank, readiness: Readiness) -> str:
    """Returns why a rank is not ready; at the first rank, why the replica is not."""
    if readiness.ready or rank.parallel.rank == 0:
        return readiness.message
    if rank.worker is None:
        return "no worker answers"
    return rank.group.problem if rank.group else ""


def _encode_worker(rank: Rank, readiness: Readiness) -> status_pb2.WorkerStatus:
    status = status_pb2.WorkerStatus(
        address=rank.address,
        state=STATES.encode(rank.state),
        message=_find_message(rank, readiness),
        rank=rank.parallel.rank,
        world_size=rank.parallel.world_size,
    )
    if start := rank.start:
        status.start.phase = status_pb2.StartPhase.Value(f"START_PHASE_{start.phase.value}")
        status.start.done_bytes, status.start.total_bytes = start.load.done_bytes, start.load.total_bytes
    if worker := rank.worker:
        status.worker_id = worker.worker_id
        status.incarnation = worker.incarnation
        status.device = worker.device
        _encode_memory(status, worker)
    return status


def _encode_memory(status: status_pb2.WorkerStatus, worker: WorkerInfo) -> None:
    if worker.model is not None:
        status.weights_bytes = worker.model.parameter_bytes
    if cache := worker.cache:
        status.device_cache_bytes = cache.cache_block_bytes * cache.num_device_blocks
        status.host_cache_bytes = cache.cache_block_bytes * cache.num_host_blocks


def encode_lora(adapter: Adapter, engines: Sequence[Engine]) -> admin_pb2.LoraStatus:
    """Encodes an adapter, the replicas that have it, and its details if a worker has read it."""
    lora_id = adapter.lora_id
    loaded = {engine.replica_id: engine for engine in engines if lora_id in engine.loras.loaded}
    found = next((engine.loras.loaded[lora_id] for engine in loaded.values()), adapter)
    resident = [
        number
        for number, engine in loaded.items()
        if engine.scheduler is not None and lora_id in engine.scheduler.lora_slots.resident_ids
    ]
    return admin_pb2.LoraStatus(
        name=adapter.name,
        lora_id=lora_id,
        path=adapter.path,
        digest=adapter.digest,
        rank=found.rank,
        targets=found.targets,
        num_bytes=found.num_bytes,
        pinned=adapter.pinned,
        loaded_replica_ids=sorted(loaded),
        resident_replica_ids=sorted(resident),
        num_virtual_tokens=adapter.num_virtual_tokens,
    )
