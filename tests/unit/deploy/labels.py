"""The rule about the labels that Kubernetes recommends: rendering adds them, so the base's files do not have them."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

from tests.unit.deploy.manifests import NAME_LABEL, ROOT, WORKLOAD_KINDS, template_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.deploy.manifests import Manifests

PREFIX = "app.kubernetes.io/"
VERSION: str = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
OF_ALL = {"instance": "blockyard", "version": VERSION, "part-of": "blockyard", "managed-by": "kustomize"}
COMPONENTS = {
    "blockyard": "shared",
    "blockyard-gateway": "gateway",
    "blockyard-scheduler": "scheduler",
    "blockyard-worker": "worker",
}
"""The component by the label of the name."""


def is_labelled(manifests: Manifests, **others: str) -> Iterator[str]:
    """Every object and every pod has all six labels. `others`: values in place of the usual ones."""
    wanted = {f"{PREFIX}{key}": value for key, value in {**OF_ALL, **others}.items()}
    for item in manifests.resources:
        where = f"{item['kind']} {item['metadata']['name']}"
        found = {where: item["metadata"].get("labels", {})}
        if item["kind"] in WORKLOAD_KINDS:
            found[f"pods of {where}"] = template_of(item)["metadata"]["labels"]
        for each, labels in found.items():
            if not wanted.items() <= labels.items():
                yield f"{each}: {labels}"
            component = labels.get(f"{PREFIX}component")
            if component is None or component != COMPONENTS.get(labels.get(NAME_LABEL, "")):
                yield f"{each}: {component} is not the component of {labels.get(NAME_LABEL)}"
