"""Manifests as the tests see them: read from the base's files, or rendered by kubectl where it is installed.

Knows the structure of Kubernetes' objects, and nothing of what they should say.
"""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

Resource = dict[str, Any]

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"
OVERLAYS = sorted(folder.name for folder in (K8S / "overlays").iterdir())
COMPONENTS = sorted(folder.name for folder in (K8S / "components").iterdir())
NAME_LABEL = "app.kubernetes.io/name"
WORKLOAD_KINDS = ("Deployment", "StatefulSet", "LeaderWorkerSet")
# What a component needs beside it: it changes what that overlay brings.
NEEDED_OVERLAYS = {"gpu-rdma": "gpu-tp", "leader-worker-set": "gpu-tp"}
HAS_KUBECTL = shutil.which("kubectl") is not None


@dataclass(frozen=True, slots=True)
class Manifests:
    """What is applied together, as parsed YAML."""

    resources: tuple[Resource, ...]

    def of_kind(self, *kinds: str) -> dict[str, Resource]:
        """Those of some kinds, by their names."""
        return {item["metadata"]["name"]: item for item in self.resources if item["kind"] in kinds}

    @property
    def workloads(self) -> dict[str, Resource]:
        """What makes pods, by the name of the service in them."""
        return {name.removeprefix("blockyard-"): item for name, item in self.of_kind(*WORKLOAD_KINDS).items()}

    def template(self, service: str) -> Resource:
        """What a service's pods are made of."""
        return template_of(self.workloads[service])

    def pod(self, service: str) -> Resource:
        """The specification of a service's pods."""
        return self.template(service)["spec"]

    def labels(self, service: str) -> dict[str, str]:
        """The labels of a service's pods."""
        return self.template(service)["metadata"]["labels"]

    def container(self, service: str) -> Resource:
        """The one container that runs all along."""
        (only,) = self.pod(service)["containers"]
        return only

    def containers(self, service: str) -> list[Resource]:
        """All containers, those that prepare a pod included."""
        return [*self.pod(service).get("initContainers", []), *self.pod(service)["containers"]]

    def ports(self, service: str) -> dict[str, int]:
        """The container's ports by name."""
        return {port["name"]: port["containerPort"] for port in self.container(service)["ports"]}

    def configured(self, container: Resource) -> dict[str, str]:
        """The environment that a container gets from ConfigMaps and literals; a value from elsewhere is "1"."""
        maps = self.of_kind("ConfigMap")
        values: dict[str, str] = {}
        for source in container.get("envFrom", []):
            values |= maps[source["configMapRef"]["name"]]["data"]
        return values | {item["name"]: item.get("value", "1") for item in container.get("env", [])}

    def changed(self, kind: str, name: str, path: str, value: Any) -> Manifests:
        """A copy with one value changed, at `a.b.0.c` of a resource; None takes it away."""
        resources = copy.deepcopy(self.resources)
        node: Any = next(item for item in resources if (item["kind"], item["metadata"]["name"]) == (kind, name))
        *steps, last = [int(step) if step.isdigit() else step.replace("~", ".") for step in path.split(".")]
        for step in steps:
            node = node[step]
        if value is None:
            del node[last]
        else:
            node[last] = value
        return Manifests(resources)


def template_of(workload: Resource) -> Resource:
    """What a workload's pods are made of."""
    spec = workload["spec"]
    return spec["leaderWorkerTemplate"]["workerTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]


def read_yaml(file: Path) -> list[Resource]:
    """The documents of a file."""
    return list(yaml.load_all(file.read_text(), yaml.CSafeLoader))


def kustomization(folder: Path) -> Resource:
    """What stands in a folder's kustomization."""
    (only,) = read_yaml(folder / "kustomization.yaml")
    return only


def literals(folder: Path) -> Iterator[tuple[str, str, str]]:
    """The settings of a kustomization: name of the ConfigMap, name of the setting, value."""
    for generator in kustomization(folder).get("configMapGenerator", []):
        for literal in generator.get("literals", []):
            name, _, value = literal.partition("=")
            yield generator["name"], name, value


def base() -> Manifests:
    """The base from its files: it has resources and ConfigMaps only, and nothing to be merged."""
    folder = K8S / "base"
    data: dict[str, dict[str, str]] = {}
    for config_map, name, value in literals(folder):
        data.setdefault(config_map, {})[name] = value
    maps = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": values}
        for name, values in data.items()
    ]
    files = [item for file in kustomization(folder)["resources"] for item in read_yaml(folder / file)]
    return Manifests((*files, *maps))


def render(folder: Path) -> Manifests:
    """What `kubectl apply --kustomize` would apply."""
    command = ["kubectl", "kustomize", "--load-restrictor=LoadRestrictionsNone", str(folder)]
    # It is over before it has garbage that is worth collecting.
    environment = {**os.environ, "GOGC": "off"}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return Manifests(tuple(yaml.load_all(done.stdout, yaml.CSafeLoader)))


def render_with(overlay: str, components: tuple[str, ...], folder: Path, **others: Any) -> Manifests:
    """An overlay with components, put together in a kustomization of its own as a user does, with its other fields."""
    made = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [_relative(K8S / "overlays" / overlay, folder)],
        "components": [_relative(K8S / "components" / name, folder) for name in components],
        **others,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(made))
    return render(folder)


@functools.cache
def rendered_set(overlay: str, components: tuple[str, ...]) -> Manifests:
    """The same with nothing else in it, rendered once for all who look at it."""
    with tempfile.TemporaryDirectory() as folder:
        return render_with(overlay, components, Path(folder))


def _relative(target: Path, folder: Path) -> str:
    """kustomize wants paths from where the kustomization is."""
    return str(Path(*[".."] * len(folder.resolve().parts[1:]), *target.resolve().parts[1:]))
