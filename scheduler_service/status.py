"""What `GetSchedulerStatus` tells, gathered from the engine, its replica and the core's counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.common.v1 import status_pb2

if TYPE_CHECKING:
    from scheduler_service.core.output import SchedulerStats
    from scheduler_service.engine import Engine


def encode_status(engine: Engine) -> status_pb2.SchedulerStatus:
    """Encodes how the scheduler and its replica are."""
    stats = engine.stats()
    status = status_pb2.SchedulerStatus(replicas=[_encode_replica(engine, stats)], num_gateways=engine.num_gateways)
    if stats:
        status.num_waiting_requests = stats.num_waiting
        status.num_preemptions = stats.num_preemptions_total
        status.num_cached_tokens = stats.num_cached_tokens_total
        status.num_prompt_tokens = stats.num_prompt_tokens_total
        status.num_completion_tokens = stats.num_completion_tokens_total
        status.num_recoveries = stats.num_recoveries_total
        status.num_replayed_tokens = stats.num_replayed_tokens_total
    return status


def _encode_replica(engine: Engine, stats: SchedulerStats | None) -> status_pb2.ReplicaStatus:
    replica = status_pb2.ReplicaStatus(
        ready=engine.is_ready,
        epoch=engine.replica.epoch,
        step_id=engine.last_step_id,
        workers=[_encode_worker(engine)],
        num_recomputed_sequences=engine.step_log.num_recomputed_sequences,
    )
    if stats:
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
    return replica


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
