"""The manifests keep to every rule as kubectl renders them: overlays, with components and without.

The Helm chart renders the same objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from k8s.generate_chart import CHART, chart
from tests.unit.deploy import manifests
from tests.unit.deploy.chart import leaves, render, values_of
from tests.unit.deploy.labels import PREFIX, is_labelled
from tests.unit.deploy.manifests import COMPONENTS, HAS_KUBECTL, K8S, NEEDED_OVERLAYS, OVERLAYS, Manifests
from tests.unit.deploy.policies import RULES, lets_the_protocol_through
from tests.unit.deploy.reachability import ADDED
from tests.unit.deploy.updates import can_be_changed_into

if TYPE_CHECKING:
    from pathlib import Path

BASE = manifests.base()
# Of the whole, only this needs a program that is not installed with the rest.
needs_kubectl = [] if HAS_KUBECTL else [pytest.mark.e2e]
SETS = [
    pytest.param((overlay, components), marks=needs_kubectl, id="+".join((overlay, *components)))
    for overlay in OVERLAYS
    for components in (
        (),
        *((name,) for name in COMPONENTS),
        ("model-volume", "monitoring", "queue-scaling"),
        ("model-from-hub", "monitoring", "queue-scaling"),
        ("api-keys", "tls", "internal-tls", "monitoring", "gateway-api", "inference-pool"),
        ("gpu-rdma", "model-from-hub", "internal-tls", "monitoring", "leader-worker-set"),
    )
    if {NEEDED_OVERLAYS.get(name, overlay) for name in components} <= {overlay}
]


@pytest.fixture(scope="module", params=SETS)
def rendered(request: pytest.FixtureRequest) -> tuple[Manifests, set[str]]:
    overlay, components = request.param
    return manifests.rendered_set(overlay, components), {overlay, *components}


def test_what_is_rendered_keeps_to_every_rule(rendered: tuple[Manifests, set[str]]) -> None:
    resources, names = rendered
    assert {rule.__name__: told for rule in RULES if (told := list(rule(resources)))} == {}
    added = set[tuple[str, str, str]]().union(*(ADDED.get(name, set()) for name in names))
    assert not list(lets_the_protocol_through(resources, added))


def test_what_is_rendered_has_the_labels_of_kubernetes(rendered: tuple[Manifests, set[str]]) -> None:
    resources, _ = rendered
    assert not list(is_labelled(resources))


@pytest.mark.parametrize("overlay", [pytest.param("cpu", marks=needs_kubectl)])
def test_a_label_that_is_missing_or_wrong_is_told(overlay: str) -> None:
    resources = manifests.render(K8S / "overlays" / overlay)
    key = f"{PREFIX}component".replace(".", "~")
    for path in (f"metadata.labels.{key}", f"spec.template.metadata.labels.{key}"):
        for value in (None, "gateway"):
            assert list(is_labelled(resources.changed("StatefulSet", "blockyard-worker", path, value)))
    assert list(is_labelled(resources, version="0.0.0"))


@pytest.mark.parametrize("overlay", [pytest.param("cpu", marks=needs_kubectl)])
def test_labels_of_ones_own_replace_them_and_no_selector(overlay: str, tmp_path: Path) -> None:
    own = {"instance": "ours", "version": "1.2.3"}
    pairs = {f"{PREFIX}{key}": value for key, value in own.items()}
    rendered = manifests.render_with(
        overlay, ("monitoring",), tmp_path, labels=[{"pairs": pairs, "includeTemplates": True}]
    )
    assert not list(is_labelled(rendered, **own))
    assert not [*can_be_changed_into(BASE, rendered)]


def test_what_is_rendered_can_be_applied_over_the_demo_and_back(rendered: tuple[Manifests, set[str]]) -> None:
    resources, _ = rendered
    assert not [*can_be_changed_into(BASE, resources), *can_be_changed_into(resources, BASE)]


@pytest.fixture(scope="module")
def charts() -> dict[frozenset[str], Manifests | str]:
    """What Helm makes of each set."""
    sets: list[tuple[str, tuple[str, ...]]] = [each.values[0] for each in SETS]
    made = render(*(values_of(overlay, components) for overlay, components in sets))
    return {frozenset((overlay, *components)): each for (overlay, components), each in zip(sets, made, strict=True)}


def test_the_chart_renders_what_kustomize_renders(
    rendered: tuple[Manifests, set[str]], charts: dict[frozenset[str], Manifests | str]
) -> None:
    resources, names = rendered
    made = charts[frozenset(names)]
    assert isinstance(made, Manifests), made
    assert leaves(made) == leaves(resources)


@pytest.mark.parametrize("path", [pytest.param("templates", marks=needs_kubectl)])
def test_the_chart_is_as_its_script_writes_it(path: str) -> None:
    written = {str(file.relative_to(CHART)): file.read_text(encoding="utf-8") for file in (CHART / path).iterdir()}
    schema = "values.schema.json"
    assert {**written, schema: (CHART / schema).read_text(encoding="utf-8")} == chart()
