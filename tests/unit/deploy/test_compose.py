"""The compose file: it parses, starts in the order of health, publishes on loopback only, and its flags exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockyard.settings import make_parser, resolve
from tests.unit.deploy.services import CONFIGURATIONS, option_of

ROOT = Path(__file__).parents[3]


def interpolate(text: str) -> str:
    """Puts in the defaults of variables, as compose does when none is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


COMPOSE: dict[str, Any] = yaml.safe_load(interpolate((ROOT / "docker-compose.yml").read_text()))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_has_the_three_services() -> None:
    assert set(SERVICES) == set(CONFIGURATIONS)


@pytest.mark.parametrize("name", SERVICES)
def test_is_started_with_settings_that_exist(name: str) -> None:
    module, configuration = CONFIGURATIONS[name]
    command = SERVICES[name]["command"]
    assert command[:3] == ["python", "-m", module]
    flags = vars(make_parser(configuration, module, "").parse_args(command[3:]))
    assert resolve(configuration, flags, environment={})


@pytest.mark.parametrize("name", SERVICES)
def test_runs_with_as_little_as_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    assert all(volume.endswith(":ro") for volume in service["volumes"])


def test_each_starts_when_the_one_behind_it_is_healthy() -> None:
    behind = {"gateway": "scheduler", "scheduler": "worker"}
    for name, other in behind.items():
        assert SERVICES[name]["depends_on"] == {other: {"condition": "service_healthy"}}
    assert "depends_on" not in SERVICES["worker"]


@pytest.mark.parametrize("name", SERVICES)
def test_health_is_asked_on_the_health_port(name: str) -> None:
    service = SERVICES[name]
    command, address, probe = service["healthcheck"]["test"][1:4], *service["healthcheck"]["test"][4:]
    assert command == ["python", "-m", "blockyard.healthcheck"]
    assert address == f"127.0.0.1:{option_of(service['command'], f'{name}_health_port')}"
    assert probe == "readiness"


def test_only_the_gateway_is_published_and_only_on_this_machine() -> None:
    assert [name for name in SERVICES if "ports" in SERVICES[name]] == ["gateway"]
    public = CONFIGURATIONS["gateway"][1]().public
    ports = (public.grpc_port, public.http_port, public.admin_port)
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]


def test_the_services_find_one_another() -> None:
    scheduler, gateway, worker = (SERVICES[name]["command"] for name in ("scheduler", "gateway", "worker"))
    for command, name, host in ((scheduler, "worker_address", "worker"), (gateway, "scheduler_address", "scheduler")):
        listens = option_of({"worker": worker, "scheduler": scheduler}[host], name)
        assert option_of(command, name) == listens.replace("0.0.0.0", host)
    assert option_of(gateway, "model") == option_of(scheduler, "model")


def test_the_gateway_may_drain() -> None:
    seconds = int(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert seconds > CONFIGURATIONS["gateway"][1]().service.drain_seconds


@pytest.mark.parametrize("name", SERVICES)
def test_is_built_from_files_that_exist(name: str) -> None:
    build = SERVICES[name]["build"]
    assert (ROOT / build["context"] / build["dockerfile"]).is_file()
