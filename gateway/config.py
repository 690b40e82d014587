"""What the gateway can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from blockyard.configuration import (
    InternalSecuritySettings,
    LogSettings,
    ModelSettings,
    PublicSettings,
    SecuritySettings,
    TextSettings,
    TracingSettings,
)
from blockyard.settings import option


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The gateway among the services."""

    scheduler_address: str = option("127.0.0.1:50060", "the scheduler: host:port or unix:/path")
    gateway_health_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of health from a thread of its own, on the same host; 0: a free port, -1: none"
    )
    gateway_local_address: str = option(
        "", "unix:/path: all APIs without keys and TLS, for whoever may open that file; empty: none"
    )
    gateway_metrics_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of /metrics beside that on the HTTP port, from a thread of its own; 0: a free port, -1: none"
    )
    drain_seconds: Annotated[float, Field(ge=0)] = option(
        30.0, "how long streams may go on after SIGTERM before they are closed"
    )
    resume_window_seconds: Annotated[float, Field(ge=0)] = option(
        60.0, "how long a request runs on without a reader, and an answer is kept after its end"
    )
    max_scheduler_wait_seconds: Annotated[float, Field(ge=0)] = option(
        300.0, "how long requests wait for a scheduler before they fail"
    )


@dataclass(frozen=True, slots=True)
class GatewayConfiguration:
    """All that the gateway reads."""

    model: ModelSettings = ModelSettings()
    text: TextSettings = TextSettings()
    public: PublicSettings = PublicSettings()
    security: SecuritySettings = SecuritySettings()
    internal: InternalSecuritySettings = InternalSecuritySettings()
    service: ServiceSettings = ServiceSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
