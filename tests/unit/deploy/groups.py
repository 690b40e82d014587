"""The rule about replicas of several workers: that the manifests make whole ones, which reach one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.settings import resolve
from tests.unit.deploy.services import CONFIGURATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.deploy.manifests import Manifests

# By what makes the pods: the labels that tell one its group, where a setting does not, and its place.
LABELS = {
    "StatefulSet": {"BLOCKYARD_WORKER_INDEX": "apps.kubernetes.io/pod-index"},
    "LeaderWorkerSet": {
        "BLOCKYARD_WORKER_GROUP": "leaderworkerset.sigs.k8s.io/group-index",
        "BLOCKYARD_WORKER_INDEX": "leaderworkerset.sigs.k8s.io/worker-index",
    },
}


def makes_whole_groups(manifests: Manifests) -> Iterator[str]:
    """As many workers as the scheduler's sizes ask for, each of which knows its place and has room for NCCL."""
    settings: Any = resolve(
        CONFIGURATIONS["scheduler"][1], {}, environment=manifests.configured(manifests.container("scheduler"))
    )
    world_size = settings.parallel.world_size
    worker = manifests.workloads["worker"]
    if worker["kind"] == "LeaderWorkerSet":
        yield from _is_one_group_each(worker["spec"], world_size)
    elif worker["spec"].get("replicas", world_size) % world_size:
        yield f"worker: {worker['spec']['replicas']} make no whole replicas of {world_size}"
    if world_size > 1:
        yield from _knows_its_place(manifests, worker["kind"])


def _is_one_group_each(spec: dict[str, Any], world_size: int) -> Iterator[str]:
    template = spec["leaderWorkerTemplate"]
    if template.get("size") != world_size:
        yield f"worker: groups of {template.get('size')} for replicas of {world_size}"
    if template.get("restartPolicy") != "None":
        yield "worker: the end of one throws away what the others have loaded"
    if spec.get("startupPolicy") != "LeaderCreated" or "leaderTemplate" in template:
        yield "worker: the first one is something else than the others"


def _knows_its_place(manifests: Manifests, kind: str) -> Iterator[str]:
    container = manifests.container("worker")
    given = manifests.configured(container)
    if missing := {"BLOCKYARD_WORKER_GROUP", "BLOCKYARD_WORKER_INDEX", "BLOCKYARD_ALLOW_INSECURE_GROUP"} - given.keys():
        yield f"worker: is not told {sorted(missing)}"
    told = {
        item["name"]: item["valueFrom"]["fieldRef"]["fieldPath"]
        for item in container.get("env", [])
        if "fieldRef" in item.get("valueFrom", {})
    }
    if told != (wanted := {name: f"metadata.labels['{label}']" for name, label in LABELS[kind].items()}):
        yield f"worker: is told {told} and not {wanted}"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume.get("emptyDir", {}) for volume in manifests.pod("worker")["volumes"]}
    if volumes.get(mounts.get("/dev/shm", ""), {}).get("medium") != "Memory":
        yield "worker: has the shared memory that a container has by default"
