"""docker-compose.yml as its profiles start it, with the variables' defaults put in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
# Those that serve, with the workers of each.
WORKERS = {"cpu": ("worker",), "gpu": ("worker",), "gpu-tp2": ("worker",), "tp2": ("worker-0", "worker-1")}
PROFILES = (*WORKERS, "monitoring")


def interpolate(text: str) -> str:
    """Puts in the defaults of variables, as compose does when none is set."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text)


COMPOSE: dict[str, Any] = yaml.safe_load(interpolate((ROOT / "docker-compose.yml").read_text()))
DEFAULTS = dict(
    line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#")
)


def services_of(profile: str) -> dict[str, dict[str, Any]]:
    """What a profile starts, by the names that the services have for one another."""
    return {
        name.removesuffix(f"-{profile}"): service
        for name, service in COMPOSE["services"].items()
        if profile in service["profiles"]
    }


def name_of(profile: str, service: str) -> str:
    """How a profile's service is called in the file."""
    return service if f"{service}-{profile}" not in COMPOSE["services"] else f"{service}-{profile}"


def kind_of(service: str) -> str:
    """Which of the three services it is: worker-0 is a worker."""
    return service.partition("-")[0]
