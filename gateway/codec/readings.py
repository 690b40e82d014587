"""Decodes the scheduler's status for the gateway's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.readings import ReplicaReading, SchedulerReading

if TYPE_CHECKING:
    from blockyard.common.v1 import status_pb2


def decode_reading(message: status_pb2.SchedulerStatus) -> SchedulerReading:
    # The status also counts sequences that wait at replicas, most of which were preempted: leave them out.
    num_waiting = message.num_waiting_requests - sum(each.num_waiting_sequences for each in message.replicas)
    return SchedulerReading(
        num_waiting_requests=max(0, num_waiting),
        num_running_requests=max(0, message.num_requests - max(0, num_waiting)),
        replicas=tuple(
            ReplicaReading(
                each.replica_id,
                each.device_blocks.num_blocks,
                _used_share(each.device_blocks),
                each.num_queried_tokens,
                each.num_cached_tokens,
                each.num_preemptions,
            )
            for each in message.replicas
            # A replica without block pools has no readings yet.
            if each.device_blocks.num_blocks
        ),
        block_size=max((each.block_size for each in message.replicas), default=0),
        max_loras=message.max_loras,
        running_loras=tuple(message.running_loras),
        waiting_loras=tuple(message.waiting_loras),
    )


def _used_share(pool: status_pb2.BlockPoolStatus) -> float:
    return (pool.num_blocks - pool.num_free_blocks) / pool.num_blocks
