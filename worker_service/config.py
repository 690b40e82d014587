"""What a worker can be told when it starts. Everything else comes from the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from blockyard.configuration import InternalSecuritySettings, LogSettings, NotNegative, TracingSettings
from blockyard.settings import option


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Where the worker is reached, and what it computes with."""

    worker_address: str = option("127.0.0.1:50070", "address to listen on: host:port (0: a free one) or unix:/path")
    worker_device: str = option("auto", "which device the scheduler may choose", choices=("auto", "cpu", "cuda"))
    worker_health_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of grpc.health.v1 in a thread of its own, on the same host; 0: a free one; -1: none"
    )
    worker_metrics_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of Prometheus' /metrics, from a thread of its own, on the same host; 0: a free port, -1: none"
    )
    num_threads: NotNegative = option(0, "threads to compute with; 0: what this model gains from, up to what there is")
    cpu_kernels: str = option(
        "auto",
        "what computes on a CPU: the best kernels that it can run, those of one instruction set (machines that differ "
        "then give the same bits), or torch's",
        choices=("auto", "avx512_bf16", "avx512", "avx2", "reference"),
    )
    enable_debug_rpcs: bool = option(False, "answer ChecksumBlocks, for tests")


@dataclass(frozen=True, slots=True)
class WorkerConfiguration:
    """All of it."""

    worker: WorkerSettings = WorkerSettings()
    internal: InternalSecuritySettings = InternalSecuritySettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
