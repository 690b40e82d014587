"""The manifests: valid by Kubernetes' own schema, within the policy, and true to the services' settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from blockyard.settings import make_parser, resolve
from tests.unit.deploy.services import CONFIGURATIONS, option_of

BASE = Path(__file__).parents[3] / "k8s" / "base"
FILES = sorted(file for file in BASE.glob("*.yaml") if file.name != "kustomization.yaml")
RESOURCES: list[dict[str, Any]] = [item for file in FILES for item in yaml.safe_load_all(file.read_text())]
WORKLOADS = {item["metadata"]["name"]: item for item in RESOURCES if item["kind"] in ("Deployment", "StatefulSet")}
SERVICES = {item["metadata"]["name"]: item for item in RESOURCES if item["kind"] == "Service"}


def pod(name: str) -> dict[str, Any]:
    return WORKLOADS[name]["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return only


def port_of(name: str, port_name: str) -> int:
    return next(port["containerPort"] for port in container(name)["ports"] if port["name"] == port_name)


@pytest.mark.parametrize("resource", RESOURCES, ids=lambda item: f"{item['kind']}-{item['metadata']['name']}")
def test_is_valid_strictly(resource: dict[str, Any]) -> None:
    kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_names_every_file() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    assert sorted(kustomization["resources"]) == [file.name for file in FILES]
    images = {image["name"] for image in kustomization["images"]}
    assert images == {container(name)["image"] for name in WORKLOADS}


def test_there_are_three_services() -> None:
    assert set(WORKLOADS) == set(SERVICES) == {"blockyard-gateway", "blockyard-scheduler", "blockyard-worker"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_runs_with_as_little_as_it_needs(name: str) -> None:
    spec, security = pod(name), container(name)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]
    assert not security["allowPrivilegeEscalation"]
    assert security["readOnlyRootFilesystem"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "hostNetwork" not in spec


@pytest.mark.parametrize("name", WORKLOADS)
def test_asks_for_resources(name: str) -> None:
    resources = container(name)["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    # A limit of processor time would stop a step in its middle.
    assert set(resources["limits"]) == {"memory"}


@pytest.mark.parametrize("name", WORKLOADS)
def test_is_probed_on_its_health_port(name: str) -> None:
    health_port = port_of(name, "grpc-health")
    for probe, service in (("startup", "liveness"), ("liveness", "liveness"), ("readiness", "readiness")):
        assert container(name)[f"{probe}Probe"]["grpc"] == {"port": health_port, "service": service}
    assert health_port == option_of(container(name)["args"], f"{name.removeprefix('blockyard-')}_health_port")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_service_selects_its_pods_and_names_their_ports(name: str) -> None:
    labels = WORKLOADS[name]["spec"]["template"]["metadata"]["labels"]
    assert SERVICES[name]["spec"]["selector"].items() <= labels.items()
    assert WORKLOADS[name]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for port in SERVICES[name]["spec"]["ports"]:
        assert port_of(name, port["targetPort"]) == port["port"]


def test_what_is_connected_to_directly_is_headless() -> None:
    # A cluster address balances connections, of which there is one for each pair here.
    for name in ("blockyard-scheduler", "blockyard-worker"):
        assert SERVICES[name]["spec"]["clusterIP"] == "None"
        assert SERVICES[name]["spec"]["publishNotReadyAddresses"]


def test_there_is_never_a_second_scheduler() -> None:
    spec = WORKLOADS["blockyard-scheduler"]["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


@pytest.mark.parametrize("service", CONFIGURATIONS)
def test_is_started_with_settings_that_exist(service: str) -> None:
    args = container(f"blockyard-{service}")["args"]
    module, configuration = CONFIGURATIONS[service]
    assert args[:3] == ["python", "-m", module]
    flags = vars(make_parser(configuration, module, "").parse_args(args[3:]))
    assert resolve(configuration, flags, environment={})


def test_the_services_find_one_another() -> None:
    scheduler, gateway = container("blockyard-scheduler")["args"], container("blockyard-gateway")["args"]
    assert option_of(scheduler, "worker_address") == f"blockyard-worker:{port_of('blockyard-worker', 'grpc-worker')}"
    port = port_of("blockyard-scheduler", "grpc-scheduler")
    assert option_of(gateway, "scheduler_address") == f"blockyard-scheduler:{port}"
    assert option_of(gateway, "model") == option_of(scheduler, "model")


def test_the_gateway_may_drain() -> None:
    configuration = CONFIGURATIONS["gateway"][1]()
    assert pod("blockyard-gateway")["terminationGracePeriodSeconds"] > configuration.service.drain_seconds


def test_the_admin_api_is_not_offered_to_the_cluster() -> None:
    assert {port["name"] for port in SERVICES["blockyard-gateway"]["spec"]["ports"]} == {"grpc", "http"}


def test_ports_are_the_defaults_of_the_settings() -> None:
    public = CONFIGURATIONS["gateway"][1]().public
    ports = {name: port_of("blockyard-gateway", name) for name in ("grpc", "http", "grpc-admin")}
    assert ports == {"grpc": public.grpc_port, "http": public.http_port, "grpc-admin": public.admin_port}
    addresses = CONFIGURATIONS["scheduler"][1]().service
    assert addresses.scheduler_address.endswith(f":{port_of('blockyard-scheduler', 'grpc-scheduler')}")
    assert addresses.worker_address.endswith(f":{port_of('blockyard-worker', 'grpc-worker')}")
