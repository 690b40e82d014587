"""What the manifests must keep to: each rule is a function that tells every breach, for base, overlays and components.

test_kubernetes.py holds the manifests to them, and test_policies.py shows that each can fail.
"""

from __future__ import annotations

import ast
import functools
import json
from typing import TYPE_CHECKING, Any

import kubernetes_validate
from pydantic import TypeAdapter
from pydantic.types import ByteSize

from blockyard.service.health import Heartbeat
from blockyard.settings import SettingsError, make_parser, resolve, settings_of
from tests.unit.deploy.exposure import has_files_that_are_mounted, routes_to_what_there_is, speaks_as_it_says
from tests.unit.deploy.groups import makes_whole_groups
from tests.unit.deploy.inference_pool import API_GROUP, is_inference_pool, pools_what_serves
from tests.unit.deploy.leader_worker_set import is_leader_worker_set
from tests.unit.deploy.manifests import NAME_LABEL, ROOT, template_of
from tests.unit.deploy.reachability import PROTOCOL, arrows, selects
from tests.unit.deploy.services import CONFIGURATIONS, option_of
from tests.unit.deploy.updates import waits_for_the_load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from tests.unit.deploy.manifests import Manifests, Resource
    from tests.unit.deploy.reachability import Arrow

    Rule = Callable[[Manifests], Iterator[str]]

# The oldest version that takes them (preStop.sleep), and the newest that is known.
VERSIONS = ("1.30.0", kubernetes_validate.latest_version())
CUSTOM = ("monitoring.coreos.com/", "keda.sh/", "gateway.networking.k8s.io/", f"{API_GROUP}/")
USER = 65532
IMAGES = {"gateway": "blockyard-control", "scheduler": "blockyard-control", "worker": "blockyard-worker"}
# What the standard "restricted" of Pod Security lets a pod mount, of what there is here.
VOLUMES = {"emptyDir", "ephemeral", "persistentVolumeClaim", "configMap", "secret"}
# What each service's readiness means. A worker listens long before it can compute, and is looked for then already.
READINESS = {"gateway": "readiness", "scheduler": "readiness", "worker": "loaded"}


def is_valid(manifests: Manifests) -> Iterator[str]:
    """Kubernetes' own schema takes every built-in resource, and every field of it is known."""
    for item in manifests.resources:
        if item["kind"] == "LeaderWorkerSet":
            yield from is_leader_worker_set(item)
            # Its pods are Kubernetes' own.
            built_in = {"apiVersion": "v1", "kind": "PodTemplate", "template": template_of(item)}
        elif item["kind"] == "InferencePool":
            yield from is_inference_pool(item)
            continue
        elif item["apiVersion"].startswith(CUSTOM):
            continue
        else:
            built_in = item
        for version in VERSIONS:
            if told := _invalid(json.dumps(built_in), version):
                yield f"{item['kind']} {item['metadata']['name']} in {version}: {told}"


@functools.cache
def _invalid(item: str, version: str) -> str:
    """What is wrong with a resource. Many of them are in all that is rendered."""
    try:
        kubernetes_validate.validate(json.loads(item), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return error.message
    return ""


def has_few_rights(manifests: Manifests) -> Iterator[str]:
    """The standard "restricted" of Pod Security, and more: a user by number, no token, a read-only root."""
    for service in manifests.workloads:
        pod = manifests.pod(service)
        wanted: dict[str, Any] = {"runAsNonRoot": True, "runAsUser": USER, "seccompProfile": {"type": "RuntimeDefault"}}
        if not wanted.items() <= pod.get("securityContext", {}).items():
            yield f"{service}: runs as {pod.get('securityContext')}"
        for name in ("automountServiceAccountToken", "enableServiceLinks"):
            if pod.get(name) is not False:
                yield f"{service}: {name}"
        for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
            if pod.get(name):
                yield f"{service}: {name}"
        for container in manifests.containers(service):
            yield from _few_rights(f"{service}/{container['name']}", container.get("securityContext", {}))


def _few_rights(name: str, given: dict[str, Any]) -> Iterator[str]:
    wanted = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    if given != wanted:
        yield f"{name}: {given} and not {wanted}"


def mounts_what_there_is(manifests: Manifests) -> Iterator[str]:
    """Every mount has its volume, of a harmless kind; /tmp can be written, within a limit."""
    for service, workload in manifests.workloads.items():
        volumes = {volume["name"]: volume for volume in manifests.pod(service)["volumes"]}
        claimed = {item["metadata"]["name"] for item in workload["spec"].get("volumeClaimTemplates", [])}
        for name, volume in volumes.items():
            if not VOLUMES.issuperset(volume.keys() - {"name"}):
                yield f"{service}: volume {name} is {volume}"
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{service}: volume {name} has no limit"
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            if claim and claim not in manifests.of_kind("PersistentVolumeClaim"):
                yield f"{service}: there is no claim {claim}"
        for container in manifests.containers(service):
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", [])}
            if not set(mounts.values()) <= {*volumes, *claimed}:
                yield f"{service}/{container['name']}: mounts {mounts}"
            if "emptyDir" not in volumes.get(mounts.get("/tmp", ""), {}):
                yield f"{service}/{container['name']}: cannot write /tmp"


def has_limits(manifests: Manifests) -> Iterator[str]:
    """Processors and memory are asked for, and memory is limited. A limit of processors would stop steps half-way."""
    for service in manifests.workloads:
        for container in manifests.containers(service):
            name = f"{service}/{container['name']}"
            requests, limits = (container.get("resources", {}).get(kind, {}) for kind in ("requests", "limits"))
            if not {"cpu", "memory"} <= requests.keys() or "memory" not in limits:
                yield f"{name}: asks for {requests} within {limits}"
            elif num_bytes(requests["memory"]) > num_bytes(limits["memory"]):
                yield f"{name}: asks for more memory than it may use"
            if "cpu" in limits:
                yield f"{name}: has a limit of processors"
    # Its block pool is a share of the limit and is taken at the start.
    memory = [manifests.container("worker").get("resources", {}).get(kind, {}) for kind in ("requests", "limits")]
    if memory[0].get("memory") != memory[1].get("memory"):
        yield "worker: uses memory that it did not ask for"


def num_bytes(quantity: str) -> int:
    """Reads a quantity of memory: 512Mi."""
    return int(TypeAdapter(ByteSize).validate_python(quantity + "B"))


def is_probed(manifests: Manifests) -> Iterator[str]:
    """By gRPC on the health port; and it takes longer to be called dead than a loop may stand still."""
    for service in manifests.workloads:
        container, port = manifests.container(service), manifests.ports(service).get("grpc-health")
        for probe, asked in (("startup", "liveness"), ("liveness", "liveness"), ("readiness", READINESS[service])):
            given = container.get(f"{probe}Probe", {})
            if given.get("grpc") != {"port": port, "service": asked}:
                yield f"{service}: {probe} asks {given.get('grpc')}"
            # From the first refusal to the last.
            patience = (given.get("failureThreshold", 3) - 1) * given.get("periodSeconds", 10)
            if patience < {"startup": 50, "liveness": 2 * Heartbeat()._max_age_seconds, "readiness": 5}[probe]:
                yield f"{service}: {probe} gives up after {patience} s"
            if given.get("timeoutSeconds", 1) < 2:
                yield f"{service}: {probe} does not wait for a busy machine"


def selects_its_pods(manifests: Manifests) -> Iterator[str]:
    """Every selector finds the pods of the service that its object's label names, and of no other."""
    for item in manifests.resources:
        where, name = f"{item['kind']} {item['metadata']['name']}", item["metadata"].get("labels", {}).get(NAME_LABEL)
        is_shared = name in (None, "blockyard")
        for selector in _selectors(item):
            found = {service for service in manifests.workloads if selects(selector, manifests.labels(service))}
            if not found or not (is_shared or found == {name.removeprefix("blockyard-")}):
                yield f"{where}: {selector} selects {found or 'nothing'}"
    for item in manifests.of_kind("StatefulSet").values():
        if (headless := item["spec"].get("serviceName")) not in manifests.of_kind("Service"):
            yield f"worker: there is no service {headless}"


def _selectors(item: Resource) -> Iterator[dict[str, Any]]:
    spec = item.get("spec", {})
    match item["kind"]:
        case "Service":
            yield {"matchLabels": spec["selector"]}
        case "Deployment" | "StatefulSet":
            yield spec["selector"]
            for constraint in spec["template"]["spec"].get("topologySpreadConstraints", []):
                yield constraint["labelSelector"]
        case "PodDisruptionBudget":
            yield spec["selector"]
        case "NetworkPolicy":
            yield spec["podSelector"]
        case _:
            pass


def reads_settings_that_exist(manifests: Manifests) -> Iterator[str]:
    """Flags and variables are known to the service that gets them, and their values are good."""
    for service in manifests.workloads:
        module, configuration = CONFIGURATIONS[service]
        container = manifests.container(service)
        known = {setting.variable for setting in settings_of(configuration)}
        given = manifests.configured(container)
        ours = {name for name in given if name.startswith("BLOCKYARD_")}
        if unknown := ours - known:
            yield f"{service}: has no settings {sorted(unknown)}"
        if container["args"][:3] != ["python", "-m", module]:
            yield f"{service}: runs {container['args'][:3]}"
        try:
            flags = vars(make_parser(configuration, module, "").parse_args(container["args"][3:]))
            resolve(configuration, flags, environment=given)
        except (SettingsError, SystemExit) as error:
            yield f"{service}: {error}"


def listens_where_it_is_looked_for(manifests: Manifests) -> Iterator[str]:
    """Ports in arguments, containers and Services are the same, and those of the settings' defaults."""
    services = manifests.of_kind("Service")
    for name, item in services.items():
        service = item["spec"]["selector"][NAME_LABEL].removeprefix("blockyard-")
        for port in item["spec"]["ports"]:
            if manifests.ports(service).get(port["targetPort"]) != port["port"]:
                yield f"Service {name}: {port} is not among {manifests.ports(service)}"
    for service, port, listens, default in _listeners(manifests):
        if not manifests.ports(service).get(port) == listens == default:
            yield f"{service}: {port} is not {listens} or not {default}: {manifests.ports(service)}"
    for service, behind in (("gateway", "scheduler"), ("scheduler", "worker")):
        first = manifests.ports(behind).get(f"grpc-{behind}", -1)
        target = option_of(manifests.container(service)["args"], f"{behind}_address")
        ports = range(first, first + (_num_workers(manifests) if behind == "worker" else 1))
        if target != ",".join(f"blockyard-{behind}:{port}" for port in ports) or f"blockyard-{behind}" not in services:
            yield f"{service}: looks for its {behind} at {target}"


def _num_workers(manifests: Manifests) -> int:
    """The workers of a pod."""
    told = [argument for argument in manifests.container("worker")["args"] if argument.startswith("--num-workers=")]
    return int(told[0].partition("=")[2]) if told else 1


def _listeners(manifests: Manifests) -> Iterator[tuple[str, str, int, int]]:
    """Service, name of its port, the port of its arguments, and the default (the argument, where that is none)."""
    args = {service: manifests.container(service)["args"] for service in manifests.workloads}
    public = CONFIGURATIONS["gateway"][1]().public
    for port, setting in (("grpc", "grpc_port"), ("http", "http_port"), ("grpc-admin", "admin_port")):
        yield "gateway", port, option_of(args["gateway"], setting), getattr(public, setting)
    defaults = CONFIGURATIONS["scheduler"][1]().service
    for service, default in (("scheduler", defaults.scheduler_address), ("worker", defaults.worker_address)):
        host, _, port = option_of(args[service], f"{service}_address").rpartition(":")
        listens = int(port) if host == "0.0.0.0" else -1
        # Where workers listen side by side, behind one another's ports, no default has room for them.
        has_default = service != "worker" or _num_workers(manifests) == 1
        yield service, f"grpc-{service}", listens, int(default.rpartition(":")[2]) if has_default else listens
    for service in args:
        health = option_of(args[service], f"{service}_health_port")
        yield service, "grpc-health", health, health


def serves_one_model(manifests: Manifests) -> Iterator[str]:
    """Gateway and scheduler are told the same."""
    given = [manifests.configured(manifests.container(service)) for service in ("gateway", "scheduler")]
    for name in ("BLOCKYARD_MODEL", "BLOCKYARD_REVISION"):
        if given[0].get(name) != given[1].get(name):
            yield f"{name}: {given[0].get(name)} and {given[1].get(name)}"


def uses_its_config_maps(manifests: Manifests) -> Iterator[str]:
    """None is referred to that does not exist, or exists in vain."""
    used = {
        source["configMapRef"]["name"]
        for service in manifests.workloads
        for container in manifests.containers(service)
        for source in container.get("envFrom", [])
    }
    # Others read this one.
    made = {name for name in manifests.of_kind("ConfigMap") if name != "blockyard-dashboard"}
    if used != made:
        yield f"{sorted(used)} are used of {sorted(made)}"


def names_its_images(manifests: Manifests) -> Iterator[str]:
    """The images that docker/ builds, each in one version."""
    tags: dict[str, str] = {}
    for service in manifests.workloads:
        if _image(manifests.container(service))[0] != IMAGES[service]:
            yield f"{service}: is {manifests.container(service)['image']}"
        for container in manifests.containers(service):
            name, whole = _image(container)
            if tags.setdefault(name, whole) != whole or name not in IMAGES.values():
                yield f"{service}/{container['name']}: {whole}, elsewhere {tags[name]}"


def _image(container: dict[str, Any]) -> tuple[str, str]:
    """An image's name, without registry and tag, and the whole of it."""
    return container["image"].rpartition("/")[2].partition(":")[0], container["image"]


def has_one_scheduler(manifests: Manifests) -> Iterator[str]:
    """Never two at once, and nothing that scales it or keeps its node from being emptied."""
    spec = manifests.workloads["scheduler"]["spec"]
    if (spec.get("replicas"), spec.get("strategy")) != (1, {"type": "Recreate"}):
        yield f"scheduler: {spec.get('replicas')} replicas, {spec.get('strategy')}"
    for kind, name in _scaled(manifests):
        if name == "blockyard-scheduler":
            yield f"scheduler: is scaled by a {kind}"
    for name, budget in manifests.of_kind("PodDisruptionBudget").items():
        if selects(budget["spec"]["selector"], manifests.labels("scheduler")):
            yield f"scheduler: cannot be moved, for {name}"


def _scaled(manifests: Manifests) -> Iterator[tuple[str, str]]:
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for item in manifests.of_kind(kind).values():
            yield kind, item["spec"]["scaleTargetRef"]["name"]


def scales_what_there_is(manifests: Manifests) -> Iterator[str]:
    """At least two gateways; and a number that an autoscaler sets stands nowhere else, or each apply would reset it."""
    scaler = manifests.of_kind("HorizontalPodAutoscaler").get("blockyard-gateway", {}).get("spec", {})
    if scaler.get("minReplicas", 1) < 2:
        yield "gateway: fewer than two"
    strategy = manifests.workloads["gateway"]["spec"].get("strategy", {})
    if strategy.get("rollingUpdate", {}).get("maxUnavailable") != 0:
        yield "gateway: goes before its successor serves"
    scaled = [name.removeprefix("blockyard-") for _, name in _scaled(manifests)]
    for service, item in manifests.workloads.items():
        if scaled.count(service) > 1 or (service in scaled) == ("replicas" in item["spec"]):
            yield f"{service}: its number is set {scaled.count(service)} times, and is {item['spec'].get('replicas')}"
    if not set(scaled) <= manifests.workloads.keys():
        yield f"there is nothing to be scaled among {scaled}"


def seconds_in(module: str) -> dict[str, float]:
    """The constants `…_SECONDS` of a module, read without importing it: the worker's needs torch."""
    tree = ast.parse((ROOT / module).read_text())
    assigned = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    names = [(node.targets[0].id, node.value) for node in assigned if isinstance(node.targets[0], ast.Name)]
    return {name.lstrip("_"): ast.literal_eval(value) for name, value in names if name.endswith("_SECONDS")}


def stop_seconds(service: str, settings: Any) -> float:
    """What a service may take from SIGTERM to its end."""
    seconds = seconds_in(f"{CONFIGURATIONS[service][0]}/server.py")
    if service == "gateway":
        return settings.service.drain_seconds + seconds["GRACE_SECONDS"]
    if service == "scheduler":
        return seconds["STOP_SECONDS"]
    ends = seconds["CLOSE_SECONDS"] + seconds["LAST_WORDS_SECONDS"] + 2 * seconds["GRACE_SECONDS"]
    return seconds["STOP_SECONDS"] + ends


def may_drain(manifests: Manifests) -> Iterator[str]:
    """The grace period holds preStop, the drain and some seconds more; only what the cluster routes to waits first."""
    for service in manifests.workloads:
        pod, container = manifests.pod(service), manifests.container(service)
        settings = resolve(CONFIGURATIONS[service][1], {}, environment=manifests.configured(container))
        pause = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed = pause + stop_seconds(service, settings) + 2
        if pod.get("terminationGracePeriodSeconds", 30) < needed:
            yield f"{service}: is killed after {pod.get('terminationGracePeriodSeconds')} s and needs {needed} s"
        if (pause > 0) != (service == "gateway"):
            yield f"{service}: waits {pause} s before it drains"


def gives_way_one_by_one(manifests: Manifests) -> Iterator[str]:
    """Of gateways and of workers one at a time, when nodes are emptied; a broken one never holds that up."""
    budgets = manifests.of_kind("PodDisruptionBudget")
    for service in ("gateway", "worker"):
        spec = budgets.get(f"blockyard-{service}", {}).get("spec", {})
        if (spec.get("maxUnavailable"), spec.get("unhealthyPodEvictionPolicy")) != (1, "AlwaysAllow"):
            yield f"{service}: {spec}"


def is_reached_directly(manifests: Manifests) -> Iterator[str]:
    """Where there is one connection for each pair, a Service gives addresses, at once; the admin port is in none."""
    services = manifests.of_kind("Service")
    for name in ("blockyard-scheduler", "blockyard-worker", "blockyard-gateway-headless"):
        if services.get(name, {}).get("spec", {}).get("clusterIP") != "None":
            yield f"Service {name}: is not headless"
    for name in ("blockyard-scheduler", "blockyard-worker"):
        if not services.get(name, {}).get("spec", {}).get("publishNotReadyAddresses"):
            yield f"Service {name}: hides who is not ready"
    for name, item in services.items():
        if {"grpc-admin", "grpc-health"} & {port["targetPort"] for port in item["spec"]["ports"]}:
            yield f"Service {name}: offers more than the protocol"


def lets_the_protocol_through(manifests: Manifests, added: AbstractSet[Arrow] = frozenset()) -> Iterator[str]:
    """NetworkPolicies let the protocol's arrows through, those that components add, and no other."""
    found, wanted = arrows(manifests), PROTOCOL | added
    yield from (f"{arrow} gets through" for arrow in sorted(found - wanted))
    yield from (f"{arrow} does not get through" for arrow in sorted(wanted - found))


RULES: tuple[Rule, ...] = (
    is_valid,
    has_few_rights,
    mounts_what_there_is,
    has_limits,
    is_probed,
    selects_its_pods,
    reads_settings_that_exist,
    listens_where_it_is_looked_for,
    serves_one_model,
    uses_its_config_maps,
    names_its_images,
    has_one_scheduler,
    scales_what_there_is,
    may_drain,
    gives_way_one_by_one,
    is_reached_directly,
    has_files_that_are_mounted,
    routes_to_what_there_is,
    speaks_as_it_says,
    waits_for_the_load,
    makes_whole_groups,
    pools_what_serves,
)
