"""The manifests keep to every rule as kubectl renders them: overlays, with components and without."""

from __future__ import annotations

import pytest

from tests.unit.deploy import manifests
from tests.unit.deploy.manifests import COMPONENTS, HAS_KUBECTL, NEEDED_OVERLAYS, OVERLAYS, Manifests
from tests.unit.deploy.policies import RULES, lets_the_protocol_through
from tests.unit.deploy.reachability import ADDED
from tests.unit.deploy.updates import can_be_changed_into

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
        ("api-keys", "tls", "internal-tls", "monitoring", "gateway-api"),
        ("gpu-rdma", "model-from-hub", "internal-tls", "monitoring", "leader-worker-set"),
    )
    if {NEEDED_OVERLAYS.get(name, overlay) for name in components} <= {overlay}
]


@pytest.fixture(scope="module", params=SETS)
def rendered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifests, set[str]]:
    overlay, components = request.param
    return manifests.render_with(overlay, components, tmp_path_factory.mktemp("k8s")), {overlay, *components}


def test_what_is_rendered_keeps_to_every_rule(rendered: tuple[Manifests, set[str]]) -> None:
    resources, names = rendered
    assert {rule.__name__: told for rule in RULES if (told := list(rule(resources)))} == {}
    added = set[tuple[str, str, str]]().union(*(ADDED.get(name, set()) for name in names))
    assert not list(lets_the_protocol_through(resources, added))


def test_what_is_rendered_can_be_applied_over_the_demo_and_back(rendered: tuple[Manifests, set[str]]) -> None:
    resources, _ = rendered
    assert not [*can_be_changed_into(BASE, resources), *can_be_changed_into(resources, BASE)]
