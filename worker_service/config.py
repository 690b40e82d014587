"""The settings that a worker starts with. Everything else comes from the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from blockyard.configuration import (
    InternalSecuritySettings,
    LogSettings,
    NotNegative,
    TracingSettings,
    WorkerProcessSettings,
)
from blockyard.settings import option

MAX_INDEX = 8191


@dataclass(frozen=True, slots=True)
class WorkerSettings(WorkerProcessSettings):
    """The worker's addresses, device and limits."""

    worker_address: str = option("127.0.0.1:50070", "address to listen on: host:port (0: a free one) or unix:/path")
    num_workers: Annotated[int, Field(ge=1, le=64)] = option(
        1,
        "workers to start together, each with a GPU: the second listens at the next port (or at a socket of the same "
        "name with its number), has the next --worker-index, and so on; --worker-health-port answers for all",
    )
    worker_device: str = option("auto", "which device the scheduler may choose", choices=("auto", "cpu", "cuda"))
    worker_device_index: NotNegative = option(0, "which of the GPUs that it sees a worker computes on")
    worker_health_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of grpc.health.v1 in a thread of its own, on the same host; 0: a free one; -1: none"
    )
    worker_metrics_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of Prometheus' /metrics, from a thread of its own, on the same host; 0: a free port, -1: none"
    )
    worker_group: str = option("", "name of the replica that this worker is a part of, where a replica has many")
    worker_index: Annotated[int, Field(ge=0, le=MAX_INDEX)] = option(
        0, "its place among the workers of --worker-group; of several replicas the second goes on where the first ends"
    )
    worker_group_host: str = option(
        "", "address at which the replica's other workers reach this one; empty: that from which it reaches the first"
    )
    allow_insecure_group: bool = option(
        False, "let the workers of a replica talk in the clear beyond this machine: see docs/guides/security.md"
    )


@dataclass(frozen=True, slots=True)
class WorkerConfiguration:
    """All settings of a worker's process."""

    worker: WorkerSettings = WorkerSettings()
    internal: InternalSecuritySettings = InternalSecuritySettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
