"""docs/guides/kubernetes.md says what is: its kustomization renders, and what it names exists."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from blockyard.settings import settings_of
from tests.unit.deploy import chart, manifests
from tests.unit.deploy.labels import is_labelled
from tests.unit.deploy.manifests import COMPONENTS, HAS_KUBECTL, K8S, ROOT
from tests.unit.deploy.policies import RULES, lets_the_protocol_through, num_bytes
from tests.unit.deploy.reachability import ADDED
from tests.unit.deploy.services import CONFIGURATIONS

if TYPE_CHECKING:
    from pathlib import Path

GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
KUSTOMIZATION, LABELS, HELM_VALUES, PICKER = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
BASE = manifests.base()
needs_kubectl = [] if HAS_KUBECTL else [pytest.mark.e2e]


@pytest.fixture(params=[pytest.param("own", marks=needs_kubectl)])
def rendered(tmp_path: Path) -> manifests.Manifests:
    """The kustomization of the guide, beside a checkout."""
    own, checkout = tmp_path / "own", tmp_path / "blockyard"
    own.mkdir()
    checkout.mkdir()
    (checkout / "k8s").symlink_to(K8S)
    (own / "kustomization.yaml").write_text(KUSTOMIZATION)
    return manifests.render(own)


def test_its_kustomization_keeps_to_every_rule(rendered: manifests.Manifests) -> None:
    assert {rule.__name__: told for rule in RULES if (told := list(rule(rendered)))} == {}
    assert not list(lets_the_protocol_through(rendered, ADDED["model-from-hub"]))


def test_its_kustomization_says_everything_that_it_changes(rendered: manifests.Manifests) -> None:
    assert {item["metadata"]["namespace"] for item in rendered.resources} == {"blockyard"}
    assert rendered.workloads["worker"]["spec"]["replicas"] == 4
    images = {container["image"] for name in rendered.workloads for container in rendered.containers(name)}
    assert images == {"registry.example/blockyard-control:0.1", "registry.example/blockyard-worker:0.1-cuda"}
    assert rendered.configured(rendered.container("scheduler"))["BLOCKYARD_MAX_NUM_SEQS"] == "128"


@pytest.mark.parametrize("overlay", [pytest.param("cpu", marks=needs_kubectl)])
def test_labels_and_patches_that_it_shows_reach_their_objects(overlay: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {}
    for block in (LABELS, PICKER):
        fields |= yaml.safe_load(block)
    rendered = manifests.render_with(overlay, ("inference-pool",), tmp_path, **fields)
    assert {rule.__name__: told for rule in RULES if (told := list(rule(rendered)))} == {}
    assert not list(is_labelled(rendered, instance="production", version="0.1.0-ours"))
    (pool,) = rendered.of_kind("InferencePool").values()
    assert pool["spec"]["endpointPickerRef"]["name"] == "our-picker"
    route = rendered.of_kind("HTTPRoute")["blockyard-pool"]["spec"]
    assert (route["parentRefs"][0]["name"], route["hostnames"]) == ("our-gateway", ["llm.our.example"])


@pytest.mark.parametrize("overlay", [pytest.param("cpu", marks=needs_kubectl)])
def test_it_asks_for_what_it_says(overlay: str) -> None:
    rendered = manifests.render(K8S / "overlays" / overlay)
    count = {"gateway": 2, "scheduler": 1, "worker": 1}
    requests = {name: rendered.container(name)["resources"]["requests"] for name in count}
    thousandths = {
        name: int(cpu[:-1]) if (cpu := requests[name]["cpu"]).endswith("m") else 1000 * int(cpu) for name in count
    }
    assert sum(count[name] * thousandths[name] for name in count) == 6000
    assert sum(count[name] * num_bytes(requests[name]["memory"]) for name in count) == 9.5 * 1024**3
    assert "six processors and 9.5 GiB" in GUIDE


def test_the_values_of_helm_say_what_they_are() -> None:
    made = chart.render_one(yaml.safe_load(HELM_VALUES))
    assert {rule.__name__: told for rule in RULES if (told := list(rule(made)))} == {}
    assert not list(lets_the_protocol_through(made, ADDED["model-from-hub"] | ADDED["monitoring"]))
    assert made.workloads["worker"]["spec"]["replicas"] == 4
    images = {container["image"] for name in made.workloads for container in made.containers(name)}
    assert images == {"registry.example/blockyard-control:0.1", "registry.example/blockyard-worker:0.1-cuda"}
    scheduler = made.configured(made.container("scheduler"))
    assert (scheduler["BLOCKYARD_MODEL"], scheduler["BLOCKYARD_MAX_NUM_SEQS"]) == ("Qwen/Qwen3-0.6B", "128")
    memory = {kind: each["memory"] for kind, each in made.container("worker")["resources"].items()}
    assert memory == {"requests": "32Gi", "limits": "32Gi"}
    assert "`k8s/chart`" in GUIDE and (K8S / "chart" / "Chart.yaml").is_file()


def test_what_its_commands_name_exists() -> None:
    commands = re.findall(r"kubectl [^`\n]+", GUIDE)
    kinds = {"service": "Service", "deployment": "Deployment", "statefulset": "StatefulSet"}
    for command in commands:
        for kind, name in re.findall(r"\b(service|deployment|statefulset)/(\S+)", command):
            assert name in BASE.of_kind(kinds[kind])
        for folder in re.findall(r"--kustomize (\S+)", command):
            assert (ROOT / folder / "kustomization.yaml").is_file()
        for number in re.findall(r"(?<= )\d{4,5}\b", command):
            assert int(number) in BASE.ports("gateway").values()
    assert len(commands) > 5


def test_settings_and_components_that_it_names_exist() -> None:
    known = {setting.variable for _, configuration in CONFIGURATIONS.values() for setting in settings_of(configuration)}
    assert known.issuperset(re.findall(r"BLOCKYARD_[A-Z_]+", GUIDE))
    for name in COMPONENTS:
        assert f"| `{name}` |" in GUIDE
    for port in (50053, 50061, 50071):
        assert str(port) in GUIDE
    assert {BASE.ports(service)["grpc-health"] for service in BASE.workloads} == {50053, 50061, 50071}
