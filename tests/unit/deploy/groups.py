"""The rule about replicas of several workers: that the manifests make whole ones, which reach one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blockyard.settings import make_parser, resolve
from tests.unit.deploy.services import CONFIGURATIONS
from worker_service.processes import divide

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.deploy.manifests import Manifests

# By what makes the pods: the fields of one that tell it its group, where a setting does not, and its place.
FIELDS = {
    "StatefulSet": {"BLOCKYARD_WORKER_INDEX": "metadata.labels['apps.kubernetes.io/pod-index']"},
    "LeaderWorkerSet": {
        "BLOCKYARD_WORKER_GROUP": "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']",
        "BLOCKYARD_WORKER_INDEX": "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']",
    },
}
# Of workers that have a pod together.
FIELDS_OF_SEVERAL = {"BLOCKYARD_WORKER_GROUP": "metadata.name"}


def settings_in(manifests: Manifests, service: str) -> Any:
    """What a service is configured with, by its arguments and its environment."""
    module, configuration = CONFIGURATIONS[service]
    container = manifests.container(service)
    flags = vars(make_parser(configuration, module, "").parse_args(container["args"][3:]))
    return resolve(configuration, flags, environment=manifests.configured(container))


def makes_whole_groups(manifests: Manifests) -> Iterator[str]:
    """As many workers as the scheduler's sizes ask for, each of which knows its place and has room for NCCL."""
    world_size = settings_in(manifests, "scheduler").parallel.world_size
    settings = settings_in(manifests, "worker").worker
    worker = manifests.workloads["worker"]
    if worker["kind"] == "LeaderWorkerSet":
        yield from _is_one_group_each(worker["spec"], world_size)
    elif settings.num_workers > 1:
        yield from _are_one_pod(manifests, settings, world_size)
    elif worker["spec"].get("replicas", world_size) % world_size:
        yield f"worker: {worker['spec']['replicas']} make no whole replicas of {world_size}"
    if world_size > 1:
        yield from _knows_its_place(manifests, settings, worker["kind"])


def _are_one_pod(manifests: Manifests, settings: Any, world_size: int) -> Iterator[str]:
    """Each has a GPU and ports that are nobody else's."""
    if settings.num_workers % world_size:
        yield f"worker: {settings.num_workers} of a pod make no whole replicas of {world_size}"
    if manifests.container("worker")["resources"]["limits"].get("nvidia.com/gpu") != str(settings.num_workers):
        yield f"worker: has not a GPU for each of {settings.num_workers}"
    ports = [settings.worker_health_port]
    for own in divide(settings):
        ports += [int(own.worker_address.rpartition(":")[2]), own.worker_health_port, own.worker_metrics_port]
    taken = [port for port in ports if port > 0]
    if len(set(taken)) < len(taken):
        yield f"worker: two listen at one of {sorted(taken)}"


def _is_one_group_each(spec: dict[str, Any], world_size: int) -> Iterator[str]:
    template = spec["leaderWorkerTemplate"]
    if template.get("size") != world_size:
        yield f"worker: groups of {template.get('size')} for replicas of {world_size}"
    if template.get("restartPolicy") != "None":
        yield "worker: the end of one throws away what the others have loaded"
    if spec.get("startupPolicy") != "LeaderCreated" or "leaderTemplate" in template:
        yield "worker: the first one is something else than the others"


def _knows_its_place(manifests: Manifests, settings: Any, kind: str) -> Iterator[str]:
    container = manifests.container("worker")
    is_alone = settings.num_workers == 1
    if not settings.worker_group:
        yield "worker: is not told its group"
    # Those of one pod talk inside it.
    if settings.allow_insecure_group != is_alone or settings.worker_group_host != ("" if is_alone else "127.0.0.1"):
        yield f"worker: talks to others at {settings.worker_group_host or 'its address'}"
    told = {
        item["name"]: item["valueFrom"]["fieldRef"]["fieldPath"]
        for item in container.get("env", [])
        if "fieldRef" in item.get("valueFrom", {})
    }
    if told != (wanted := FIELDS[kind] if is_alone else FIELDS_OF_SEVERAL):
        yield f"worker: is told {told} and not {wanted}"
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume.get("emptyDir", {}) for volume in manifests.pod("worker")["volumes"]}
    if volumes.get(mounts.get("/dev/shm", ""), {}).get("medium") != "Memory":
        yield "worker: has the shared memory that a container has by default"
