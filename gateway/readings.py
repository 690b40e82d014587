"""The scheduler's load, as the gateway's metrics show it."""

from __future__ import annotations

from typing import NamedTuple


class ReplicaReading(NamedTuple):
    """A replica's load: the share of its device blocks in use, and totals that begin anew when it is set up."""

    replica_id: int
    kv_usage: float
    num_queried_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class SchedulerReading(NamedTuple):
    """The scheduler's load at one time: requests that wait for a replica and those that one has taken."""

    num_waiting_requests: int
    num_running_requests: int
    replicas: tuple[ReplicaReading, ...]
