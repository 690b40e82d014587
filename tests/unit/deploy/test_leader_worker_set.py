"""The manifest of the component `leader-worker-set` has fields that there are, and a field that is wrong is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.deploy.leader_worker_set import is_leader_worker_set
from tests.unit.deploy.manifests import K8S, Manifests, read_yaml

WRITTEN = Manifests(tuple(read_yaml(K8S / "components" / "leader-worker-set" / "leader-worker-set.yaml")))
TEMPLATE = "spec.leaderWorkerTemplate"


def test_the_component_has_fields_that_there_are() -> None:
    (item,) = WRITTEN.resources
    assert not list(is_leader_worker_set(item))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("apiVersion", "leaderworkerset.x-k8s.io/v1alpha1"),
        ("metadata.annotations.leaderworkerset~sigs~k8s~io/exclusive-topologies", "kubernetes.io/hostname"),
        ("spec.replicas", "1"),
        ("spec.size", 2),
        ("spec.startupPolicy", "LeaderStarted"),
        (f"{TEMPLATE}.size", 2.5),
        (f"{TEMPLATE}.restartPolicy", "Never"),
        (f"{TEMPLATE}.workerTemplate", None),
        (f"{TEMPLATE}.template", {}),
    ],
)
def test_a_field_that_is_wrong_is_told(path: str, value: Any) -> None:
    (item,) = WRITTEN.changed("LeaderWorkerSet", "blockyard-worker", path, value).resources
    assert len(list(is_leader_worker_set(item))) == 1
