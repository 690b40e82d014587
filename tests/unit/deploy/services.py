"""The three services as a deployment sees them: a module to run and a class of settings."""

from __future__ import annotations

from typing import Any

import yaml

from gateway.config import GatewayConfiguration
from scheduler_service.config import SchedulerConfiguration
from worker_service.config import WorkerConfiguration

CONFIGURATIONS: dict[str, tuple[str, Any]] = {
    "gateway": ("gateway", GatewayConfiguration),
    "scheduler": ("scheduler_service", SchedulerConfiguration),
    "worker": ("worker_service", WorkerConfiguration),
}


def option_of(arguments: list[str], name: str) -> Any:
    """Gives the value of `--name=value` or `--name value` in a command line, as YAML reads it."""
    flag = "--" + name.replace("_", "-")
    joined = "\n".join(arguments).replace(f"{flag}\n", f"{flag}=").split("\n")
    (value,) = [argument.removeprefix(f"{flag}=") for argument in joined if argument.startswith(f"{flag}=")]
    return yaml.safe_load(value) if value.isdigit() else value
