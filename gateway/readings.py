"""The values for the scheduler's load in the gateway's metrics."""

from __future__ import annotations

from typing import NamedTuple


class ReplicaReading(NamedTuple):
    """A replica's load: the share of its device blocks in use, and totals since the replica was set up."""

    replica_id: int
    kv_usage: float
    num_queried_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class SchedulerReading(NamedTuple):
    """The scheduler's load at one time: requests that wait for a replica, and requests that a replica has taken."""

    num_waiting_requests: int
    num_running_requests: int
    replicas: tuple[ReplicaReading, ...]
