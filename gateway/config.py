"""The gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from blockyard.configuration import (
    GatewayProcessSettings,
    InternalSecuritySettings,
    LogSettings,
    ModelSettings,
    PublicSettings,
    ResumeSettings,
    SecuritySettings,
    TextSettings,
    TracingSettings,
)
from blockyard.settings import option


@dataclass(frozen=True, slots=True)
class ServiceSettings(GatewayProcessSettings):
    scheduler_address: str = option("127.0.0.1:50060", "the scheduler: host:port or unix:/path")
    gateway_health_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of a health service in its own thread, on the same host; 0: any free port, -1: none"
    )
    gateway_lora_root: str = option(
        "",
        "folder below which this machine has the adapters (LoRA) at the same paths as the workers: requests use the"
        " tokenizers and chat templates that adapters bring; empty: all use the model's",
    )
    gateway_local_address: str = option(
        "", "unix:/path at which all APIs are served without keys and TLS, to whoever may open that file; empty: none"
    )


@dataclass(frozen=True, slots=True)
class GatewayConfiguration:
    model: ModelSettings = ModelSettings()
    text: TextSettings = TextSettings()
    public: PublicSettings = PublicSettings()
    security: SecuritySettings = SecuritySettings()
    internal: InternalSecuritySettings = InternalSecuritySettings()
    service: ServiceSettings = ServiceSettings()
    resume: ResumeSettings = ResumeSettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()
