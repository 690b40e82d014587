"""Rules about changing what is there: what an update waits for, and what cannot be changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.deploy.manifests import Manifests, Resource

# What may change in a StatefulSet that is there. Anything else makes `kubectl apply` fail.
CHANGEABLE = {
    *("replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit", "minReadySeconds"),
    "persistentVolumeClaimRetentionPolicy",
}


def waits_for_the_load(manifests: Manifests) -> Iterator[str]:
    """An update of workers goes on when one has loaded; nothing waits for readiness that has to come before it."""
    if manifests.workloads["worker"]["kind"] != "StatefulSet":
        return
    spec = manifests.workloads["worker"]["spec"]
    if spec.get("podManagementPolicy") != "Parallel":
        yield "worker: is not started before another one is ready"
    if "minReadySeconds" in spec:
        yield "worker: an update guesses how long loading takes"
    if spec.get("updateStrategy", {"type": "RollingUpdate"})["type"] != "RollingUpdate":
        yield "worker: is not updated by itself"


def can_be_changed_into(before: Manifests, after: Manifests) -> Iterator[str]:
    """`kubectl apply` can make one of the other: what may not change once it is there is the same in both."""
    for kind in ("Deployment", "StatefulSet", "Service"):
        was, becomes = before.of_kind(kind), after.of_kind(kind)
        for name in was.keys() & becomes.keys():
            specs = [_fixed(kind, item[name]["spec"]) for item in (was, becomes)]
            if specs[0] != specs[1]:
                yield f"{kind} {name}: {specs[0]} cannot become {specs[1]}"


def _fixed(kind: str, spec: Resource) -> Resource:
    if kind == "Deployment":
        return {"selector": spec["selector"]}
    if kind == "Service":
        return {"clusterIP": spec.get("clusterIP")}
    return {name: value for name, value in spec.items() if name not in CHANGEABLE}
