"""Each rule can fail: a manifest with one thing wrong is told, by the rule that is there for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.deploy import manifests
from tests.unit.deploy.inference_pool import ENGINE_LABEL
from tests.unit.deploy.policies import RULES, lets_the_protocol_through, seconds_in, stop_seconds
from tests.unit.deploy.reachability import PROTOCOL
from tests.unit.deploy.services import CONFIGURATIONS
from tests.unit.deploy.updates import can_be_changed_into

if TYPE_CHECKING:
    from collections.abc import Iterator

BASE = manifests.base()
ROUTES = manifests.read_yaml(manifests.K8S / "components" / "gateway-api" / "routes.yaml")
POOL = manifests.read_yaml(manifests.K8S / "components" / "inference-pool" / "pool.yaml")
ENGINE = f"spec.template.metadata.labels.{ENGINE_LABEL.replace('.', '~')}"
EVERY_RULE = [*RULES, lets_the_protocol_through]
POD = "spec.template.spec"
CONTAINER = f"{POD}.containers.0"
LABEL = "app~kubernetes~io/name"
GATEWAY, SCHEDULER, WORKER = "blockyard-gateway", "blockyard-scheduler", "blockyard-worker"
ANY_POD = {"podSelector": {}, "namespaceSelector": {}}
ALL = (
    manifests.Manifests((*BASE.resources, *ROUTES, *POOL))
    .changed("Deployment", GATEWAY, ENGINE, "vllm")
    .changed("ConfigMap", GATEWAY, "data.BLOCKYARD_VLLM_METRIC_NAMES", "true")
)

# By rule: kind, name, path and new value (None: taken away) of something that must not pass.
MUTATIONS: dict[str, list[tuple[str, str, str, Any]]] = {
    "is_valid": [
        ("Deployment", GATEWAY, "spec.replicsa", 2),
        ("Deployment", SCHEDULER, f"{POD}.terminationGracePeriodSeconds", "15s"),
        ("StatefulSet", WORKER, "spec.serviceName", 7),
        ("Deployment", GATEWAY, f"{CONTAINER}.lifecycle.preStop.sleep.duration", 5),
        ("NetworkPolicy", WORKER, "spec.egress", "none"),
        ("PodDisruptionBudget", WORKER, "spec.minUnavailable", 1),
        ("HorizontalPodAutoscaler", GATEWAY, "spec.maxReplicas", None),
        ("Service", WORKER, "spec.ports.0.port", "grpc-worker"),
        ("ConfigMap", WORKER, "data.BLOCKYARD_NUM_THREADS", 4),
        ("InferencePool", "blockyard", "apiVersion", "inference.networking.k8s.io/v1alpha2"),
        ("InferencePool", "blockyard", "spec.selector", {"app~kubernetes~io/name": GATEWAY}),
        ("InferencePool", "blockyard", "spec.targetPorts", [{"number": 8000}, {"number": 8001}]),
        ("InferencePool", "blockyard", "spec.targetPortNumber", 8000),
        ("InferencePool", "blockyard", "spec.extensionRef", {"name": "blockyard-epp"}),
        ("InferencePool", "blockyard", "spec.endpointPickerRef.port", 9002),
        ("InferencePool", "blockyard", "spec.endpointPickerRef.port", None),
        ("InferencePool", "blockyard", "spec.endpointPickerRef.failureMode", "Open"),
    ],
    "has_few_rights": [
        ("Deployment", GATEWAY, f"{POD}.securityContext.runAsNonRoot", False),
        ("Deployment", GATEWAY, f"{POD}.securityContext", None),
        ("StatefulSet", WORKER, f"{POD}.securityContext.runAsUser", 0),
        ("StatefulSet", WORKER, f"{POD}.securityContext.seccompProfile.type", "Unconfined"),
        ("Deployment", SCHEDULER, f"{POD}.automountServiceAccountToken", True),
        ("Deployment", SCHEDULER, f"{POD}.enableServiceLinks", None),
        ("StatefulSet", WORKER, f"{POD}.hostNetwork", True),
        ("StatefulSet", WORKER, f"{CONTAINER}.securityContext.privileged", True),
        ("StatefulSet", WORKER, f"{CONTAINER}.securityContext.capabilities.add", ["SYS_ADMIN"]),
        ("Deployment", GATEWAY, f"{CONTAINER}.securityContext.readOnlyRootFilesystem", None),
        ("Deployment", GATEWAY, f"{CONTAINER}.securityContext.runAsUser", 0),
        ("Deployment", GATEWAY, f"{POD}.initContainers", [{"name": "fetch", "image": "blockyard-control"}]),
    ],
    "mounts_what_there_is": [
        ("StatefulSet", WORKER, f"{POD}.volumes.0", {"name": "tmp", "hostPath": {"path": "/tmp"}}),
        ("StatefulSet", WORKER, f"{POD}.volumes.0.emptyDir", {}),
        ("Deployment", GATEWAY, f"{POD}.volumes.0.name", "other"),
        ("Deployment", GATEWAY, f"{CONTAINER}.volumeMounts", None),
        (
            "Deployment",
            GATEWAY,
            f"{POD}.volumes.0",
            {"name": "tmp", "persistentVolumeClaim": {"claimName": "blockyard-models"}},
        ),
    ],
    "has_limits": [
        ("Deployment", GATEWAY, f"{CONTAINER}.resources", None),
        ("Deployment", SCHEDULER, f"{CONTAINER}.resources.limits", None),
        ("Deployment", SCHEDULER, f"{CONTAINER}.resources.requests.cpu", None),
        ("Deployment", SCHEDULER, f"{CONTAINER}.resources.requests.memory", "3Gi"),
        ("StatefulSet", WORKER, f"{CONTAINER}.resources.limits.cpu", "2"),
        ("StatefulSet", WORKER, f"{CONTAINER}.resources.limits.memory", "8Gi"),
    ],
    "is_probed": [
        ("Deployment", GATEWAY, f"{CONTAINER}.startupProbe", None),
        ("Deployment", GATEWAY, f"{CONTAINER}.readinessProbe.grpc.service", "liveness"),
        ("Deployment", SCHEDULER, f"{CONTAINER}.livenessProbe.grpc.service", None),
        ("Deployment", SCHEDULER, f"{CONTAINER}.livenessProbe.grpc.port", 50060),
        ("StatefulSet", WORKER, f"{CONTAINER}.livenessProbe.failureThreshold", 1),
        ("StatefulSet", WORKER, f"{CONTAINER}.livenessProbe", {"exec": {"command": ["true"]}}),
        ("StatefulSet", WORKER, f"{CONTAINER}.readinessProbe.timeoutSeconds", None),
        ("StatefulSet", WORKER, f"{CONTAINER}.readinessProbe.grpc.service", "readiness"),
    ],
    "selects_its_pods": [
        ("Service", WORKER, f"spec.selector.{LABEL}", "worker"),
        ("Service", WORKER, f"spec.selector.{LABEL}", SCHEDULER),
        ("Deployment", SCHEDULER, f"spec.selector.matchLabels.{LABEL}", GATEWAY),
        ("PodDisruptionBudget", WORKER, f"spec.selector.matchLabels.{LABEL}", GATEWAY),
        ("NetworkPolicy", WORKER, f"spec.podSelector.matchLabels.{LABEL}", "blockyard_worker"),
        ("StatefulSet", WORKER, f"{POD}.topologySpreadConstraints.0.labelSelector.matchLabels.{LABEL}", GATEWAY),
        ("StatefulSet", WORKER, "spec.serviceName", "worker"),
    ],
    "reads_settings_that_exist": [
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_DRAIN_TIME", "90"),
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_DRAIN_SECONDS", "soon"),
        ("ConfigMap", SCHEDULER, "data.BLOCKYARD_DEVICE", "gpu"),
        ("ConfigMap", WORKER, "data.BLOCKYARD_DEVICE", "cpu"),
        ("ConfigMap", "blockyard-model", "data.BLOCKYARD_SERVED_MODEL_NAME", "mine"),
        ("Deployment", GATEWAY, f"{CONTAINER}.args.2", "scheduler_service"),
        ("StatefulSet", WORKER, f"{CONTAINER}.args.3", "--address=0.0.0.0:50070"),
    ],
    "listens_where_it_is_looked_for": [
        ("Service", GATEWAY, "spec.ports.0.targetPort", "http"),
        ("Service", SCHEDULER, "spec.ports.0.port", 50061),
        ("Service", SCHEDULER, "metadata.name", "scheduler"),
        ("Deployment", GATEWAY, f"{CONTAINER}.ports.1.containerPort", 8080),
        ("Deployment", GATEWAY, f"{CONTAINER}.args.4", "--grpc-port=50050"),
        ("Deployment", GATEWAY, f"{CONTAINER}.args.8", "--scheduler-address=blockyard-worker:50070"),
        ("Deployment", SCHEDULER, f"{CONTAINER}.args.3", "--scheduler-address=127.0.0.1:50060"),
        ("Deployment", SCHEDULER, f"{CONTAINER}.args.5", "--worker-address=blockyard-worker:50071"),
        ("StatefulSet", WORKER, f"{CONTAINER}.args.4", "--worker-health-port=50072"),
    ],
    "serves_one_model": [
        ("Deployment", SCHEDULER, f"{CONTAINER}.env", [{"name": "BLOCKYARD_MODEL", "value": "/models/other"}]),
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_REVISION", "v2"),
    ],
    "uses_its_config_maps": [
        ("ConfigMap", WORKER, "metadata.name", "blockyard-workers"),
        ("StatefulSet", WORKER, f"{CONTAINER}.envFrom", None),
    ],
    "names_its_images": [
        ("StatefulSet", WORKER, f"{CONTAINER}.image", "blockyard-control"),
        ("Deployment", GATEWAY, f"{CONTAINER}.image", "blockyard-control:other"),
        ("Deployment", GATEWAY, f"{CONTAINER}.image", "registry.example:5000/blockyard-control"),
        ("Deployment", GATEWAY, f"{POD}.initContainers", [{"name": "fetch", "image": "busybox"}]),
        ("Deployment", GATEWAY, f"{POD}.initContainers", [{"name": "fetch", "image": "blockyard-control:old"}]),
    ],
    "has_one_scheduler": [
        ("Deployment", SCHEDULER, "spec.replicas", 2),
        ("Deployment", SCHEDULER, "spec.replicas", None),
        ("Deployment", SCHEDULER, "spec.strategy", {"type": "RollingUpdate"}),
        ("HorizontalPodAutoscaler", GATEWAY, "spec.scaleTargetRef.name", SCHEDULER),
        ("PodDisruptionBudget", WORKER, "spec.selector", {}),
    ],
    "scales_what_there_is": [
        ("HorizontalPodAutoscaler", GATEWAY, "spec.minReplicas", 1),
        ("HorizontalPodAutoscaler", GATEWAY, "metadata.name", "gateway"),
        ("HorizontalPodAutoscaler", GATEWAY, "spec.scaleTargetRef.name", "blockyard"),
        ("HorizontalPodAutoscaler", GATEWAY, "spec.scaleTargetRef.name", WORKER),
        ("Deployment", GATEWAY, "spec.replicas", 2),
        ("StatefulSet", WORKER, "spec.replicas", None),
        ("Deployment", GATEWAY, "spec.strategy.rollingUpdate.maxUnavailable", 1),
    ],
    "may_drain": [
        ("Deployment", GATEWAY, f"{POD}.terminationGracePeriodSeconds", 95),
        ("Deployment", GATEWAY, f"{POD}.terminationGracePeriodSeconds", None),
        ("Deployment", GATEWAY, f"{CONTAINER}.lifecycle", None),
        ("Deployment", GATEWAY, f"{CONTAINER}.lifecycle.preStop.sleep.seconds", 30),
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_DRAIN_SECONDS", "120"),
        ("Deployment", SCHEDULER, f"{POD}.terminationGracePeriodSeconds", 2),
        ("Deployment", SCHEDULER, f"{CONTAINER}.lifecycle", {"preStop": {"sleep": {"seconds": 5}}}),
        ("StatefulSet", WORKER, f"{POD}.terminationGracePeriodSeconds", 8),
    ],
    "gives_way_one_by_one": [
        ("PodDisruptionBudget", WORKER, "metadata.name", "workers"),
        ("PodDisruptionBudget", GATEWAY, "spec.maxUnavailable", "100%"),
        ("PodDisruptionBudget", GATEWAY, "spec.unhealthyPodEvictionPolicy", None),
    ],
    "is_reached_directly": [
        ("Service", WORKER, "spec.clusterIP", None),
        ("Service", "blockyard-gateway-headless", "spec.clusterIP", None),
        ("Service", SCHEDULER, "spec.publishNotReadyAddresses", False),
        ("Service", GATEWAY, "spec.ports.0.targetPort", "grpc-admin"),
    ],
    "has_files_that_are_mounted": [
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_TLS_CERTIFICATE", "/etc/blockyard/tls/tls.crt"),
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_API_KEYS_FILE", "keys.yaml"),
        ("Deployment", GATEWAY, f"{POD}.volumes.0", {"name": "tmp", "secret": {"secretName": "blockyard-tls"}}),
    ],
    "routes_to_what_there_is": [
        ("HTTPRoute", "blockyard", "spec.rules.0.backendRefs.0.port", 50051),
        ("HTTPRoute", "blockyard", "spec.rules.0.backendRefs.0.name", SCHEDULER),
        ("HTTPRoute", "blockyard", "spec.rules.0.timeouts", None),
        ("HTTPRoute", "blockyard", "spec.rules.0.timeouts.request", "60s"),
        ("GRPCRoute", "blockyard", "spec.rules.0.backendRefs.0.port", 50052),
        ("GRPCRoute", "blockyard", "spec.hostnames", ["llm.example.com"]),
        ("HTTPRoute", "blockyard-pool", "spec.rules.0.backendRefs.0.name", GATEWAY),
        ("HTTPRoute", "blockyard-pool", "spec.rules.0.backendRefs.0.group", "inference.networking.x-k8s.io"),
    ],
    "speaks_as_it_says": [
        ("Service", GATEWAY, "spec.ports.0.appProtocol", None),
        ("Service", "blockyard-gateway-headless", "spec.ports.0.appProtocol", "https"),
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_TLS_CERTIFICATE", "/etc/blockyard/tls/tls.crt"),
    ],
    "waits_for_the_load": [
        ("StatefulSet", WORKER, "spec.podManagementPolicy", None),
        ("StatefulSet", WORKER, "spec.minReadySeconds", 20),
        ("StatefulSet", WORKER, "spec.updateStrategy", {"type": "OnDelete"}),
    ],
    "makes_whole_groups": [
        ("ConfigMap", SCHEDULER, "data.BLOCKYARD_TENSOR_PARALLEL_SIZE", "2"),
        ("ConfigMap", SCHEDULER, "data.BLOCKYARD_PIPELINE_PARALLEL_SIZE", "3"),
    ],
    "pools_what_serves": [
        ("InferencePool", "blockyard", f"spec.selector.matchLabels.{LABEL}", WORKER),
        ("InferencePool", "blockyard", "spec.targetPorts.0.number", 50051),
        ("Deployment", GATEWAY, ENGINE, None),
        ("Deployment", GATEWAY, ENGINE, "sglang"),
        ("ConfigMap", GATEWAY, "data.BLOCKYARD_VLLM_METRIC_NAMES", None),
    ],
    "lets_the_protocol_through": [
        ("NetworkPolicy", GATEWAY, "spec.ingress.0.from", None),
        ("NetworkPolicy", GATEWAY, "spec.ingress.0.from.0", ANY_POD),
        ("NetworkPolicy", GATEWAY, "spec.ingress.0.from.1", {"ipBlock": {"cidr": "0.0.0.0/0"}}),
        ("NetworkPolicy", GATEWAY, "spec.ingress.0.ports", None),
        ("NetworkPolicy", GATEWAY, "spec.ingress.0.ports.0.port", 50052),
        ("NetworkPolicy", GATEWAY, "spec.egress.0.to", None),
        ("NetworkPolicy", SCHEDULER, "spec.ingress.0.from.0", ANY_POD),
        ("NetworkPolicy", SCHEDULER, "spec.ingress", None),
        ("NetworkPolicy", SCHEDULER, "spec.egress.0.ports.0.port", 50060),
        ("NetworkPolicy", SCHEDULER, "spec.policyTypes", ["Ingress"]),
        ("NetworkPolicy", WORKER, "spec.ingress.0.from.0.podSelector", {}),
        ("NetworkPolicy", WORKER, "spec.policyTypes", ["Ingress"]),
        ("NetworkPolicy", WORKER, "spec.egress", [{}]),
        ("NetworkPolicy", "blockyard-dns", "spec.egress.0.to.0.podSelector", None),
        ("NetworkPolicy", "blockyard-dns", "spec.egress.0.to.1.ipBlock.cidr", "169.254.0.0/16"),
        ("NetworkPolicy", "blockyard-dns", "spec.egress.0.ports.1", None),
    ],
}


def mutations() -> Iterator[Any]:
    for rule in EVERY_RULE:
        for mutation in MUTATIONS[rule.__name__]:
            kind, name, path, value = mutation
            yield pytest.param(rule, mutation, id=f"{rule.__name__}-{kind}-{name}-{path}={value!s:.40}")


def test_every_rule_is_shown_to_fail() -> None:
    assert list(MUTATIONS) == [rule.__name__ for rule in EVERY_RULE]
    assert all(MUTATIONS.values())


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.__name__)
def test_what_is_right_is_not_told(rule: Any) -> None:
    assert not list(rule(ALL))


@pytest.mark.parametrize(("rule", "mutation"), list(mutations()))
def test_what_is_wrong_is_told(rule: Any, mutation: tuple[str, str, str, Any]) -> None:
    assert list(rule(ALL.changed(*mutation)))


@pytest.mark.parametrize(
    "mutation",
    [
        ("Deployment", GATEWAY, f"spec.selector.matchLabels.{LABEL}", "other"),
        ("StatefulSet", WORKER, "spec.volumeClaimTemplates", [{"metadata": {"name": "hub"}}]),
        ("StatefulSet", WORKER, "spec.serviceName", "other"),
        ("StatefulSet", WORKER, "spec.podManagementPolicy", None),
        ("Service", WORKER, "spec.clusterIP", None),
    ],
    ids=lambda mutation: f"{mutation[1]}-{mutation[2]}",
)
def test_what_cannot_be_applied_over_what_is_there_is_told(mutation: tuple[str, str, str, Any]) -> None:
    assert list(can_be_changed_into(BASE, BASE.changed(*mutation)))
    assert not list(can_be_changed_into(BASE, BASE.changed("StatefulSet", WORKER, "spec.replicas", 3)))


@pytest.mark.parametrize(
    "missing", list(BASE.of_kind("NetworkPolicy").values()), ids=lambda item: item["metadata"]["name"]
)
def test_every_network_policy_is_needed(missing: manifests.Resource) -> None:
    without = manifests.Manifests(tuple(item for item in BASE.resources if item != missing))
    assert list(lets_the_protocol_through(without))


@pytest.mark.parametrize("arrow", sorted(PROTOCOL), ids=" ".join)
def test_an_arrow_too_many_or_too_few_is_told(arrow: tuple[str, str, str]) -> None:
    extra = ("gateway", "worker", "50070/TCP")
    assert list(lets_the_protocol_through(BASE, {extra})) == [f"{extra} does not get through"]
    closed = BASE
    for name, policy in BASE.of_kind("NetworkPolicy").items():
        for direction in ("ingress", "egress"):
            if policy["spec"].get(direction):
                closed = closed.changed("NetworkPolicy", name, f"spec.{direction}", [])
    assert f"{arrow} does not get through" in set(lets_the_protocol_through(closed))


def test_the_time_to_stop_is_read_from_the_services() -> None:
    assert seconds_in("worker_service/server.py")["STOP_SECONDS"] > 0
    needed = {name: stop_seconds(name, configuration()) for name, (_, configuration) in CONFIGURATIONS.items()}
    assert needed["gateway"] > CONFIGURATIONS["gateway"][1]().service.drain_seconds
    assert 0 < needed["scheduler"] < needed["worker"] < needed["gateway"]
