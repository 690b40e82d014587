"""The compose file: it parses, starts in the order of health, publishes on loopback only, and its flags exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from blockyard.settings import make_parser, resolve, settings_of
from tests.unit.deploy.compose import (
    COMPOSE,
    DEFAULTS,
    PROFILES,
    ROOT,
    WORKERS,
    interpolate,
    kind_of,
    name_of,
    services_of,
)
from tests.unit.deploy.services import CONFIGURATIONS, option_of
from worker_service.config import WorkerConfiguration
from worker_service.processes import divide

SERVING = [(profile, name) for profile in WORKERS for name in (*WORKERS[profile], "scheduler", "gateway")]
ALL = [*SERVING, ("monitoring", "prometheus")]


@pytest.mark.parametrize("profile", WORKERS)
def test_a_profile_has_the_three_services(profile: str) -> None:
    assert set(services_of(profile)) == {*WORKERS[profile], "scheduler", "gateway"}


def test_nothing_is_outside_of_the_profiles() -> None:
    assert sum(len(services_of(profile)) for profile in PROFILES) == len(COMPOSE["services"])
    assert all(len(service["profiles"]) == 1 for service in COMPOSE["services"].values())


def test_the_default_is_the_cpu() -> None:
    assert DEFAULTS == {"COMPOSE_PROJECT_NAME": "blockyard", "COMPOSE_PROFILES": "cpu"}


def test_the_oldest_compose_takes_it() -> None:
    """Keys of the file that docker-compose 1.29 does not know make it refuse the whole file."""
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "volumes"}
    conditions = [set(other) for s in COMPOSE["services"].values() for other in s.get("depends_on", {}).values()]
    assert conditions and all(keys == {"condition"} for keys in conditions)
    assert all("start_interval" not in service.get("healthcheck", {}) for service in COMPOSE["services"].values())


@pytest.mark.parametrize(("profile", "name"), SERVING)
def test_is_started_with_settings_that_exist(profile: str, name: str) -> None:
    service = services_of(profile)[name]
    module, configuration = CONFIGURATIONS[kind_of(name)]
    assert service["command"][:3] == ["python", "-m", module]
    flags = vars(make_parser(configuration, module, "").parse_args(service["command"][3:]))
    environment = service.get("environment", {})
    assert set(environment) <= {setting.variable for setting in settings_of(configuration)}
    assert resolve(configuration, flags, environment=environment)


def test_settings_that_the_file_for_them_names_exist() -> None:
    known = {setting.variable for _, configuration in CONFIGURATIONS.values() for setting in settings_of(configuration)}
    named = re.findall(r"^# (BLOCKYARD_\w+)=", (ROOT / "docker" / "settings.env").read_text(), re.MULTILINE)
    assert named and set(named) <= known
    files = {services_of(profile)[name]["env_file"] for profile, name in SERVING}
    assert files == {"./docker/settings.env"}


@pytest.mark.parametrize(("profile", "name"), ALL)
def test_runs_with_as_little_as_it_needs(profile: str, name: str) -> None:
    service = services_of(profile)[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert "privileged" not in service
    written = [volume for volume in service["volumes"] if not volume.endswith(":ro")]
    assert written == (["metrics:/prometheus"] if name == "prometheus" else [])


@pytest.mark.parametrize(("profile", "name"), ALL)
def test_comes_back_and_does_not_fill_the_disk_with_logs(profile: str, name: str) -> None:
    service = services_of(profile)[name]
    assert service["restart"] == "unless-stopped"
    assert {"max-size", "max-file"} <= service["logging"]["options"].keys()


@pytest.mark.parametrize("profile", WORKERS)
def test_each_starts_when_the_one_behind_it_is_healthy(profile: str) -> None:
    services = services_of(profile)
    for name, others in {"gateway": ("scheduler",), "scheduler": WORKERS[profile]}.items():
        wanted = {name_of(profile, other): {"condition": "service_healthy"} for other in others}
        assert services[name]["depends_on"] == wanted
    assert not [name for name in WORKERS[profile] if "depends_on" in services[name]]


@pytest.mark.parametrize(("profile", "name"), SERVING)
def test_health_is_asked_on_the_health_port(profile: str, name: str) -> None:
    service = services_of(profile)[name]
    address = f"127.0.0.1:{option_of(service['command'], f'{kind_of(name)}_health_port')}"
    assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "blockyard.service.healthcheck", address]


@pytest.mark.parametrize("profile", WORKERS)
def test_only_the_gateway_is_published_and_only_on_this_machine(profile: str) -> None:
    services = services_of(profile)
    assert [name for name in services if "ports" in services[name]] == ["gateway"]
    public = CONFIGURATIONS["gateway"][1]().public
    # The admin API is on the container's own loopback: `docker compose exec gateway blockyard admin …`.
    ports = (public.grpc_port, public.http_port)
    assert services["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in ports]


def addresses_of(worker: dict[str, Any]) -> list[str]:
    """Where the workers of a container listen."""
    flags = vars(make_parser(WorkerConfiguration, "worker_service", "").parse_args(worker["command"][3:]))
    settings = resolve(WorkerConfiguration, flags, environment={}).worker
    several = divide(settings) if settings.num_workers > 1 else [settings]
    return [each.worker_address for each in several]


@pytest.mark.parametrize("profile", WORKERS)
def test_the_services_find_one_another(profile: str) -> None:
    services = services_of(profile)
    scheduler, gateway = (services[name]["command"] for name in ("scheduler", "gateway"))
    listens = [
        address.replace("0.0.0.0", name) for name in WORKERS[profile] for address in addresses_of(services[name])
    ]
    assert option_of(scheduler, "worker_address") == "+".join(listens)
    assert option_of(gateway, "scheduler_address") == option_of(scheduler, "scheduler_address").replace(
        "0.0.0.0", "scheduler"
    )
    assert option_of(gateway, "model") == option_of(scheduler, "model")
    if profile != "cpu":
        aliases = {name: service["networks"]["default"]["aliases"] for name, service in services.items()}
        assert aliases == {name: [kind_of(name)] for name in services}


def test_two_workers_are_one_replica() -> None:
    services = services_of("tp2")
    assert option_of(services["scheduler"]["command"], "tensor_parallel_size") == 2
    # Each is in a container of its own, and reaches the other over the project's network.
    assert all("--allow-insecure-group" in services[name]["command"] for name in WORKERS["tp2"])
    assert services["worker-0"] == services["worker-1"]


def test_two_workers_of_one_container_are_one_replica() -> None:
    services = services_of("gpu-tp2")
    assert option_of(services["scheduler"]["command"], "tensor_parallel_size") == 2
    assert option_of(services["worker"]["command"], "num_workers") == 2
    assert option_of(services["worker"]["command"], "worker_group_host") == "127.0.0.1"
    assert services["worker"]["shm_size"] == "8gb"


@pytest.mark.parametrize(("profile", "count"), [("gpu", 1), ("gpu-tp2", 2)])
def test_a_gpu_is_reserved_where_it_is_used(profile: str, count: int) -> None:
    (device,) = services_of(profile)["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
    devices = [services_of(each)["scheduler"]["environment"] for each in ("cpu", profile)]
    assert devices == [{"BLOCKYARD_DEVICE": "cpu"}, {"BLOCKYARD_DEVICE": "cuda"}]


@pytest.mark.parametrize("profile", WORKERS)
def test_what_a_worker_compiles_can_be_run(profile: str) -> None:
    """Docker mounts a tmpfs noexec; a worker on a GPU compiles kernels and loads them from there."""
    for name in WORKERS[profile]:
        wanted = "/tmp:exec" if "deploy" in services_of(profile)[name] else "/tmp"
        assert services_of(profile)[name]["tmpfs"] == [wanted]


def test_each_device_has_its_own_build_of_torch() -> None:
    workers = {profile: services_of(profile)["worker"] for profile in ("cpu", "gpu")}
    indexes = {profile: worker["build"]["args"]["TORCH_INDEX_URL"] for profile, worker in workers.items()}
    assert indexes["cpu"].endswith("/cpu") and re.search(r"/cu\d+$", indexes["gpu"])
    assert workers["cpu"]["image"] != workers["gpu"]["image"]
    assert {services_of(profile)["scheduler"]["image"] for profile in workers} == {"blockyard-control:dev"}


@pytest.mark.parametrize("profile", WORKERS)
def test_the_gateway_may_drain(profile: str) -> None:
    seconds = int(services_of(profile)["gateway"]["stop_grace_period"].removesuffix("s"))
    assert seconds > CONFIGURATIONS["gateway"][1]().service.drain_seconds


@pytest.mark.parametrize(("profile", "name"), SERVING)
def test_is_built_from_files_that_exist_with_arguments_that_they_have(profile: str, name: str) -> None:
    build = services_of(profile)[name]["build"]
    dockerfile = (ROOT / build["context"] / build["dockerfile"]).read_text()
    assert set(build["args"]) == set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))


def test_a_variable_that_is_set_empty_stays_so_where_that_means_something() -> None:
    text = "${TORCH_INDEX_URL-a} ${PIP_INDEX_URL:-} ${BASE_IMAGE:-b:c}"
    assert interpolate(text) == "a  b:c"
    assert "${TORCH_INDEX_URL-http" in (ROOT / "docker-compose.yml").read_text()


def test_the_guide_tells_every_variable() -> None:
    guide = (ROOT / "docs" / "guides" / "compose.md").read_text()
    rows = re.findall(r"^\| (`[A-Z_]+`.*?) \|", guide, re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([A-Z_]+)`", row)}
    assert told == set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))


def test_a_health_check_is_the_same_in_file_and_image() -> None:
    """Where the image has one: the control plane's is the gateway's."""
    for name, image in (("gateway", "control"), ("worker", "worker")):
        check = services_of("cpu")[name]["healthcheck"]
        dockerfile = (ROOT / "docker" / f"{image}.Dockerfile").read_text()
        told = dict(re.findall(r"--(interval|timeout|start-period)=(\w+)", dockerfile))
        assert told == {key: check[key.replace("-", "_")] for key in ("interval", "timeout", "start-period")}


def test_prometheus_is_told_where_the_services_tell_their_numbers() -> None:
    told: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    found = {
        job["job_name"]: (sd["names"], sd["port"]) for job in told["scrape_configs"] for sd in job["dns_sd_configs"]
    }
    for profile in WORKERS:
        commands = {kind_of(name): service["command"] for name, service in services_of(profile).items()}
        assert found == {name: ([name], option_of(commands[name], f"{name}_metrics_port")) for name in CONFIGURATIONS}
    mounted = services_of("monitoring")["prometheus"]["volumes"][0]
    assert mounted == "./docker/prometheus.yml:/etc/prometheus/prometheus.yml:ro"
