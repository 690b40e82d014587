"""Where the values of the Helm chart go in the objects that kustomize renders."""

from __future__ import annotations

SERVICES = ("gateway", "scheduler", "worker")
CLAIM = "pod/blockyard-worker spec.volumes.hub.ephemeral.volumeClaimTemplate.spec"
PLACES: dict[str, tuple[str, ...]] = {
    "imagePullSecrets": tuple(f"pod/blockyard-{service} spec.imagePullSecrets" for service in SERVICES),
    "model": ("ConfigMap/blockyard-model data.BLOCKYARD_MODEL",),
    "revision": ("ConfigMap/blockyard-model data.BLOCKYARD_REVISION",),
    "gateway.minReplicas": ("HorizontalPodAutoscaler/blockyard-gateway spec.minReplicas",),
    "gateway.maxReplicas": ("HorizontalPodAutoscaler/blockyard-gateway spec.maxReplicas",),
    "gateway.resources": ("pod/blockyard-gateway spec.containers.gateway.resources",),
    "scheduler.resources": ("pod/blockyard-scheduler spec.containers.scheduler.resources",),
    "worker.replicas": (
        "StatefulSet/blockyard-worker spec.replicas",
        "LeaderWorkerSet/blockyard-worker spec.replicas",
    ),
    "worker.groupSize": ("LeaderWorkerSet/blockyard-worker spec.leaderWorkerTemplate.size",),
    "worker.minReplicas": ("ScaledObject/blockyard-worker spec.minReplicaCount",),
    "worker.maxReplicas": ("ScaledObject/blockyard-worker spec.maxReplicaCount",),
    "worker.resources": ("pod/blockyard-worker spec.containers.worker.resources",),
    "worker.nodeSelector": ("pod/blockyard-worker spec.nodeSelector",),
    "worker.tolerations": ("pod/blockyard-worker spec.tolerations",),
    "prometheusAddress": tuple(
        f"ScaledObject/blockyard-worker spec.triggers.{trigger}.metadata.serverAddress"
        for trigger in ("no-worker", "waiting", "running")
    ),
    "storage.models.className": ("PersistentVolumeClaim/blockyard-models spec.storageClassName",),
    "storage.models.accessModes": ("PersistentVolumeClaim/blockyard-models spec.accessModes",),
    "storage.models.size": ("PersistentVolumeClaim/blockyard-models spec.resources.requests.storage",),
    "storage.hub.className": (f"{CLAIM}.storageClassName",),
    "storage.hub.size": (f"{CLAIM}.resources.requests.storage",),
    "secrets.apiKeys": ("pod/blockyard-gateway spec.volumes.api-keys.secret.secretName",),
    "secrets.tls": ("pod/blockyard-gateway spec.volumes.tls.secret.secretName",),
    "secrets.hub": tuple(
        f"pod/blockyard-{service} spec.initContainers.fetch-model.env.HF_TOKEN.valueFrom.secretKeyRef.name"
        for service in ("gateway", "worker")
    ),
    **{
        f"secrets.{service}Identity": (f"pod/blockyard-{service} spec.volumes.identity.secret.secretName",)
        for service in SERVICES
    },
    "routes.parentRefs": (
        "HTTPRoute/blockyard spec.parentRefs",
        "GRPCRoute/blockyard spec.parentRefs",
        "HTTPRoute/blockyard-pool spec.parentRefs",
    ),
    "routes.httpHostnames": ("HTTPRoute/blockyard spec.hostnames",),
    "routes.grpcHostnames": ("GRPCRoute/blockyard spec.hostnames",),
    "routes.poolHostnames": ("HTTPRoute/blockyard-pool spec.hostnames",),
    "picker.name": ("InferencePool/blockyard spec.endpointPickerRef.name",),
    "picker.port": ("InferencePool/blockyard spec.endpointPickerRef.port.number",),
}
"""Where each value goes: `Kind/name a.b.c`, an element of a list by its name. `pod/…` is what a workload makes pods of.
An object there is merged with the value; anything else is replaced by it."""

Address = tuple[str, ...]
VALUES: dict[Address, str] = {
    (target, *path.split(".")): value
    for value, places in PLACES.items()
    for target, path in (place.split(" ") for place in places)
}
"""The value that goes to an address."""
