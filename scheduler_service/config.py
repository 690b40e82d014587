"""The scheduler's settings: its own, and those of the model and the step that it passes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from blockyard.configuration import (
    CacheSettings,
    DeviceSettings,
    InternalSecuritySettings,
    LoadSettings,
    LogSettings,
    ModelSettings,
    ParallelSettings,
    ResumeSettings,
    SchedulerProcessSettings,
    SchedulerSettings,
    TracingSettings,
)
from blockyard.lora.settings import LoraSettings
from blockyard.settings import option
from blockyard.speculation import DraftLimits, SpeculationSettings


@dataclass(frozen=True, slots=True)
class ServiceSettings(SchedulerProcessSettings):
    """The addresses of the scheduler and its workers."""

    scheduler_address: str = option("127.0.0.1:50060", "listen on host:port (port 0: a free one) or unix:/path")
    worker_address: str = option(
        "127.0.0.1:50070",
        "the workers: host:port, DNS names with a port, or unix:/path, separated by commas; those of one replica by "
        "plus signs, in the order of their ranks",
    )
    scheduler_health_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of health from a thread of its own, on the same host; 0: a free port, -1: none"
    )
    scheduler_metrics_port: Annotated[int, Field(ge=-1, le=65535)] = option(
        -1, "port of Prometheus' /metrics, from a thread of its own, on the same host; 0: a free port, -1: none"
    )
    wait_for_repair: bool = option(
        True, "wait where the first worker cannot load the model as configured; off: say why and exit"
    )


@dataclass(frozen=True, slots=True)
class SchedulerConfiguration:
    """All settings of the scheduler."""

    model: ModelSettings = ModelSettings()
    load: LoadSettings = LoadSettings()
    device: DeviceSettings = DeviceSettings()
    parallel: ParallelSettings = ParallelSettings()
    cache: CacheSettings = CacheSettings()
    lora: LoraSettings = LoraSettings()
    speculation: SpeculationSettings = SpeculationSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    service: ServiceSettings = ServiceSettings()
    resume: ResumeSettings = ResumeSettings()
    internal: InternalSecuritySettings = InternalSecuritySettings()
    log: LogSettings = LogSettings()
    tracing: TracingSettings = TracingSettings()

    def draft_limits(self, num_state_blocks: int = 0) -> DraftLimits:
        """Returns the most tokens that replicas draft in a step. `num_state_blocks`: the fixed blocks of a sequence."""
        return self.speculation.find_limits(self.parallel, num_state_blocks)


def model_source(settings: ModelSettings) -> str:
    """Returns the model's name for a worker: an absolute folder, a hub id, or empty for its demo model."""
    if not settings.model:
        return ""
    folder = Path(settings.model).expanduser()
    # A folder that does not exist here may exist on the worker's machine.
    return str(folder.absolute()) if folder.is_dir() else settings.model
