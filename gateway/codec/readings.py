"""Decodes the scheduler's status for the gateway's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gateway.readings import ReplicaReading, SchedulerReading

if TYPE_CHECKING:
    from blockyard.common.v1 import status_pb2


def decode_reading(message: status_pb2.SchedulerStatus) -> SchedulerReading:
    # It counts what waits at replicas too, most of which was preempted.
    num_waiting = message.num_waiting_requests - sum(each.num_waiting_sequences for each in message.replicas)
    return SchedulerReading(
        num_waiting_requests=max(0, num_waiting),
        num_running_requests=max(0, message.num_requests - max(0, num_waiting)),
        replicas=tuple(
            ReplicaReading(
                each.replica_id,
                _used_share(each.device_blocks),
                each.num_queried_tokens,
                each.num_cached_tokens,
                each.num_preemptions,
            )
            for each in message.replicas
            # Before its pools exist there are no numbers.
            if each.device_blocks.num_blocks
        ),
    )


def _used_share(pool: status_pb2.BlockPoolStatus) -> float:
    return (pool.num_blocks - pool.num_free_blocks) / pool.num_blocks
