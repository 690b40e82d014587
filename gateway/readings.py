"""The values for the scheduler's load in the gateway's metrics."""

from __future__ import annotations

from typing import NamedTuple


class ReplicaReading(NamedTuple):
    """A replica's device blocks, the share of them that is in use, and totals since the replica was set up."""

    replica_id: int
    num_blocks: int
    kv_usage: float
    num_queried_tokens: int
    num_cached_tokens: int
    num_preemptions: int


class SchedulerReading(NamedTuple):
    """The scheduler's load at one time: requests that wait for a replica, and requests that a replica has taken.

    `block_size`: tokens per block; 0 without replicas. `max_loras`: the most adapters in one step of a replica.
    `running_loras`, `waiting_loras`: names of the adapters of the requests.
    """

    num_waiting_requests: int
    num_running_requests: int
    replicas: tuple[ReplicaReading, ...]
    block_size: int = 0
    max_loras: int = 0
    running_loras: tuple[str, ...] = ()
    waiting_loras: tuple[str, ...] = ()

    @property
    def num_blocks(self) -> int:
        """The device blocks of all replicas."""
        return sum(each.num_blocks for each in self.replicas)

    @property
    def kv_usage(self) -> float:
        """The share of the device blocks of all replicas that is in use; 0 without replicas."""
        used = sum(each.kv_usage * each.num_blocks for each in self.replicas)
        return used / self.num_blocks if self.replicas else 0.0
