"""What `GetSchedulerStatus` tells, gathered from the engines and their schedulers' counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import status_pb2

if TYPE_CHECKING:
    from scheduler_service.core.output import SchedulerStats
    from scheduler_service.engine import Engine
    from scheduler_service.scheduling import Scheduling


def encode_status(scheduling: Scheduling) -> status_pb2.SchedulerStatus:
    """Encodes how the scheduler and its replicas are."""
    stats, dispatcher = scheduling.stats(), scheduling.dispatcher
    return status_pb2.SchedulerStatus(
        replicas=[_encode_replica(engine) for engine in scheduling.engines],
        num_gateways=len(scheduling.requests.attachments),
        num_waiting_requests=len(scheduling.backlog) + sum(each.num_waiting for each in stats),
        num_preemptions=sum(each.num_preemptions_total for each in stats),
        num_cached_tokens=sum(each.num_cached_tokens_total for each in stats),
        num_prompt_tokens=sum(each.num_prompt_tokens_total for each in stats),
        num_completion_tokens=sum(each.num_completion_tokens_total for each in stats),
        num_recoveries=dispatcher.num_recoveries,
        num_replayed_tokens=dispatcher.num_replayed_tokens,
    )


def _encode_replica(engine: Engine) -> status_pb2.ReplicaStatus:
    replica = status_pb2.ReplicaStatus(
        replica_id=engine.replica_id,
        ready=engine.is_ready,
        epoch=engine.replica.epoch,
        step_id=engine.last_step_id,
        workers=[_encode_worker(engine)],
        num_recomputed_sequences=engine.step_log.num_recomputed_sequences,
    )
    if engine.scheduler is not None:
        _encode_stats(replica, engine.scheduler.stats())
    return replica


def _encode_stats(replica: status_pb2.ReplicaStatus, stats: SchedulerStats) -> None:
    replica.device_blocks.num_blocks = stats.num_device_blocks
    replica.device_blocks.num_free_blocks = stats.num_free_device_blocks
    replica.device_blocks.num_cached_blocks = stats.num_cached_device_blocks
    replica.host_blocks.num_blocks = stats.num_host_blocks
    replica.host_blocks.num_free_blocks = stats.num_free_host_blocks
    replica.num_running_sequences = stats.num_running
    replica.num_swapped_sequences = stats.num_swapped
    replica.num_prefill_pieces = stats.num_prefill_pieces_total
    replica.num_swapped_out_blocks = stats.num_swapped_out_blocks_total
    replica.num_swapped_in_blocks = stats.num_swapped_in_blocks_total
    replica.num_copied_blocks = stats.num_copied_blocks_total


def _encode_worker(engine: Engine) -> status_pb2.WorkerStatus:
    replica = engine.replica
    status = status_pb2.WorkerStatus(
        address=replica.address,
        state=status_pb2.WorkerState.Value(f"WORKER_STATE_{replica.state.value}"),
        message=engine.readiness.message,
    )
    if worker := replica.worker:
        status.worker_id = worker.worker_id
        status.incarnation = worker.incarnation
        status.device = worker.device
    return status
