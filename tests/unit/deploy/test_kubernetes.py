"""The manifests keep to every rule, as files."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from blockyard.service.health import HealthServer
from blockyard.service.healthcheck import check
from blockyard.settings import settings_of
from tests.unit.deploy import manifests
from tests.unit.deploy.manifests import COMPONENTS, K8S, OVERLAYS
from tests.unit.deploy.policies import IMAGES, RULES, lets_the_protocol_through
from tests.unit.deploy.services import CONFIGURATIONS
from tests.unit.deploy.updates import CHANGEABLE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.deploy.policies import Rule

BASE = manifests.base()
FOLDERS = [
    K8S / "base",
    *(K8S / "overlays" / name for name in OVERLAYS),
    *(K8S / "components" / name for name in COMPONENTS),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_base_keeps_to(rule: Rule) -> None:
    assert not list(rule(BASE))


def test_the_base_lets_the_protocol_through_and_nothing_else() -> None:
    assert not list(lets_the_protocol_through(BASE))


def test_there_are_three_services() -> None:
    assert set(BASE.workloads) == set(CONFIGURATIONS) == set(IMAGES)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_kustomization_names_every_file(folder: Path) -> None:
    told = manifests.kustomization(folder)
    named = [*told.get("resources", []), *told.get("configurations", [])]
    named += [*(item["path"] for item in told.get("patches", []) if "path" in item)]
    made = [file for item in told.get("configMapGenerator", []) for file in item.get("files", [])]
    assert {file.rpartition("=")[2] for file in made} == {file.name for file in folder.glob("*.json")}
    files = {file.name for file in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert {name for name in named if not name.startswith("..")} == files
    assert all((folder / name).exists() for name in named)


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.name)
def test_a_patch_changes_something_that_exists(folder: Path) -> None:
    known = {(item["kind"], item["metadata"]["name"]) for item in BASE.resources}
    for patch in manifests.kustomization(folder).get("patches", []):
        targets = (
            manifests.read_yaml(folder / patch["path"]) if "path" in patch else [{"metadata": {}, **patch["target"]}]
        )
        for target in targets:
            assert (target["kind"], target["metadata"].get("name") or target["name"]) in known


@pytest.mark.parametrize("folder", FOLDERS[1:], ids=lambda folder: folder.name)
def test_a_patch_changes_nothing_of_a_stateful_set_that_cannot_be_changed(folder: Path) -> None:
    patched = [item for file in folder.glob("*.yaml") for item in manifests.read_yaml(file)]
    for item in patched:
        if item.get("kind") == "StatefulSet":
            assert item["spec"].keys() <= CHANGEABLE


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_setting_that_is_named_exists(folder: Path) -> None:
    """Here without kubectl, by whose ConfigMap it is; the rules look at the values, too."""
    known = {
        f"blockyard-{service}": {setting.variable for setting in settings_of(configuration)}
        for service, (_, configuration) in CONFIGURATIONS.items()
    }
    known["blockyard-model"] = known["blockyard-gateway"] & known["blockyard-scheduler"]
    for config_map, name, _ in manifests.literals(folder):
        assert name in known[config_map]


def test_what_probes_ask_for_is_what_health_servers_answer() -> None:
    asked = {
        BASE.container(service)[f"{probe}Probe"]["grpc"]["service"]
        for service, probe in itertools.product(BASE.workloads, ("startup", "liveness", "readiness"))
    }
    server = HealthServer(lambda: True, lambda: True, {"loaded": lambda: True})
    try:
        address = f"127.0.0.1:{server.start('127.0.0.1:0')}"
        assert {name: check(address, name) for name in asked} == dict.fromkeys(asked, "")
    finally:
        server.stop()
