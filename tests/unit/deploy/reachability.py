"""Who reaches whom by the NetworkPolicies, as Kubernetes reads them: a small evaluator of ingress and egress rules.

Policies add up; a pod that none selects in a direction is open in it; a connection needs its sender's egress and its
receiver's ingress. The traffic between a pod and its own node is never kept out, and is not looked at.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.unit.deploy.manifests import NAME_LABEL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.unit.deploy.manifests import Manifests, Resource

OWN_NAMESPACE = "blockyard"
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
Arrow = tuple[str, str, str]
METRICS_PORTS = (50054, 50062, 50072)
# A worker's, and of a pod that has several the first and the last that a policy lets through, and those beside them.
WORKER_PORTS = (50070, 50079, 50080, 50087, 50088)


@dataclass(frozen=True, slots=True)
class Peer:
    """One end of a connection: a pod, or an address outside of the cluster."""

    name: str
    pod_labels: dict[str, str] = field(default_factory=dict)
    namespace_labels: dict[str, str] = field(default_factory=lambda: {NAMESPACE_LABEL: OWN_NAMESPACE})
    address: str = ""

    @property
    def is_ours(self) -> bool:
        """Whether policies of our namespace can select it."""
        return not self.address and self.namespace_labels.get(NAMESPACE_LABEL) == OWN_NAMESPACE


# Everybody else that a policy could let in or out, by what it must not.
OTHERS = (
    Peer("neighbour", {"app": "client"}),
    Peer("friend", {"app": "ingress"}, {NAMESPACE_LABEL: "ingress", "blockyard-client": "true"}),
    Peer("stranger", {NAME_LABEL: "blockyard-gateway"}, {NAMESPACE_LABEL: "elsewhere"}),
    Peer("prometheus", {NAME_LABEL: "prometheus"}, {NAMESPACE_LABEL: "monitoring"}),
    Peer("beside prometheus", {NAME_LABEL: "grafana"}, {NAMESPACE_LABEL: "monitoring"}),
    Peer("collector", {NAME_LABEL: "opentelemetry-collector"}, {NAMESPACE_LABEL: "observability"}),
    Peer("beside collector", {NAME_LABEL: "tempo"}, {NAMESPACE_LABEL: "observability"}),
    Peer("dns", {"k8s-app": "kube-dns"}, {NAMESPACE_LABEL: "kube-system"}),
    Peer("beside dns", {"k8s-app": "metrics-server"}, {NAMESPACE_LABEL: "kube-system"}),
    Peer("dns cache", address="169.254.20.10"),
    Peer("metadata", address="169.254.169.254"),
    Peer("private host", address="10.1.2.3"),
    Peer("internet", address="203.0.113.9"),
)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    operators = {
        "In": lambda value, values: value in values,
        "NotIn": lambda value, values: value not in values,
        "Exists": lambda value, _: value is not None,
        "DoesNotExist": lambda value, _: value is None,
    }
    return all(
        operators[expression["operator"]](labels.get(expression["key"]), expression.get("values"))
        for expression in selector.get("matchExpressions", [])
    )


def _is_meant(rule_peer: dict[str, Any], peer: Peer) -> bool:
    if (block := rule_peer.get("ipBlock")) is not None:
        if not peer.address:
            return False
        address = ipaddress.ip_address(peer.address)
        inside = [address in ipaddress.ip_network(cidr) for cidr in (block["cidr"], *block.get("except", []))]
        return inside[0] and not any(inside[1:])
    if peer.address:
        return False
    namespaces = rule_peer.get("namespaceSelector")
    is_in_namespace = peer.is_ours if namespaces is None else selects(namespaces, peer.namespace_labels)
    return is_in_namespace and selects(rule_peer.get("podSelector", {}), peer.pod_labels)


def _lets(rule: dict[str, Any], key: str, peer: Peer, port: str) -> bool:
    ports = [
        f"{number}/{item.get('protocol', 'TCP')}"
        for item in rule.get("ports", [])
        for number in range(item["port"], item.get("endPort", item["port"]) + 1)
    ]
    peers = rule.get(key, [])
    return (not ports or port in ports) and (not peers or any(_is_meant(item, peer) for item in peers))


def _is_open(policies: Iterable[Resource], pod: Peer, direction: str, peer: Peer, port: str) -> bool:
    if not pod.is_ours:
        return True
    specs = [policy["spec"] for policy in policies]
    governing = [
        spec for spec in specs if direction in spec["policyTypes"] and selects(spec["podSelector"], pod.pod_labels)
    ]
    key = {"Ingress": "from", "Egress": "to"}[direction]
    rules = [rule for spec in governing for rule in spec.get(direction.lower(), [])]
    return not governing or any(_lets(rule, key, peer, port) for rule in rules)


def arrows(manifests: Manifests) -> set[Arrow]:
    """Every (from, to, port/protocol) that is let through and has one of our pods at one of its ends.

    From a service to itself is from one of its pods to another one.

    Tried with all ports that anybody here may listen on, OTLP's, DNS, HTTPS, SSH, and a port that nothing listens on.
    """
    policies = list(manifests.of_kind("NetworkPolicy").values())
    ours = [Peer(service, manifests.labels(service)) for service in manifests.workloads]
    numbers = {port for service in manifests.workloads for port in manifests.ports(service).values()}
    ports = [
        *(f"{number}/TCP" for number in {*numbers, *METRICS_PORTS, *WORKER_PORTS, 22, 53, 443, 4317, 9999}),
        "53/UDP",
        "443/UDP",
    ]
    everybody = [*ours, *OTHERS]
    return {
        (source.name, target.name, port)
        for source in everybody
        for target in everybody
        for port in ports
        if source in ours or target in ours
        if _is_open(policies, source, "Egress", target, port) and _is_open(policies, target, "Ingress", source, port)
    }


def between(sources: Iterable[str], targets: Iterable[str], *ports: str) -> set[Arrow]:
    """The arrows from each of some to each of others."""
    targets = list(targets)
    return {(source, target, port) for source in sources for target in targets for port in ports}


# What the protocol needs.
PROTOCOL = {
    # `neighbour` is any pod of the namespace, and so are scheduler and worker: none of them has a way out to it.
    *between(["neighbour", "friend"], ["gateway"], "50051/TCP", "8000/TCP"),
    ("gateway", "scheduler", "50060/TCP"),
    ("scheduler", "worker", "50070/TCP"),
    *between(["gateway", "scheduler"], ["dns", "dns cache"], "53/UDP", "53/TCP"),
}
# What overlays and components add.
ADDED = {
    # Of those that were tried: any.
    "gpu-tp": between(
        ["worker"],
        ["worker"],
        *(f"{port}/TCP" for port in (22, 53, 443, 4317, 9999)),
        *(f"{port}/TCP" for port in (50051, 8000, 50052, 50053, 50060, 50061, 50071, *METRICS_PORTS, *WORKER_PORTS)),
        *("53/UDP", "443/UDP"),
    ),
    "gpu-nvlink": between(["scheduler"], ["worker"], "50080/TCP", "50087/TCP"),
    "monitoring": {
        ("prometheus", "gateway", "50054/TCP"),
        ("prometheus", "scheduler", "50062/TCP"),
        ("prometheus", "worker", "50072/TCP"),
    },
    "tracing": {
        *between(["gateway", "scheduler", "worker"], ["collector"], "4317/TCP"),
        *between(["worker"], ["dns", "dns cache"], "53/UDP", "53/TCP"),
    },
    "model-from-hub": {
        *between(["gateway", "worker"], ["internet"], "443/TCP"),
        *between(["worker"], ["dns", "dns cache"], "53/UDP", "53/TCP"),
    },
}
