"""The evaluator of network policies against what Kubernetes' documentation says of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.deploy.manifests import NAME_LABEL, Manifests
from tests.unit.deploy.reachability import arrows, selects


def system(*policies: dict[str, Any]) -> Manifests:
    """Two services, `a` with port 1 and `b` with port 2, and these policies."""
    workloads = [
        {
            "kind": "Deployment",
            "metadata": {"name": name},
            "spec": {
                "template": {
                    "metadata": {"labels": {NAME_LABEL: name}},
                    "spec": {"containers": [{"ports": [{"name": "port", "containerPort": port}]}]},
                }
            },
        }
        for name, port in (("a", 1), ("b", 2))
    ]
    made = [{"kind": "NetworkPolicy", "metadata": {"name": str(i)}, "spec": spec} for i, spec in enumerate(policies)]
    return Manifests((*workloads, *made))


def pods(name: str) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": {NAME_LABEL: name}}}


def isolated(name: str, *types: str, **rules: Any) -> dict[str, Any]:
    return {**pods(name), "policyTypes": list(types), **rules}


def test_what_no_policy_selects_is_open() -> None:
    found = arrows(system())
    assert {("a", "b", "2/TCP"), ("internet", "a", "9999/TCP"), ("b", "internet", "443/UDP")} <= found


def test_a_policy_without_rules_closes_its_direction_only() -> None:
    found = arrows(system(isolated("a", "Ingress")))
    assert not [arrow for arrow in found if arrow[1] == "a"]
    assert ("a", "b", "2/TCP") in found


def test_a_connection_needs_both_ends() -> None:
    lets_in = isolated("b", "Ingress", ingress=[{"from": [pods("a")], "ports": [{"port": 2}]}])
    keeps_in = isolated("a", "Egress")
    assert ("a", "b", "2/TCP") in arrows(system(lets_in))
    assert ("a", "b", "2/TCP") not in arrows(system(lets_in, keeps_in))


def test_policies_add_up() -> None:
    closed, opened = isolated("b", "Ingress"), isolated("b", "Ingress", ingress=[{"from": [pods("a")]}])
    assert ("a", "b", "2/TCP") in arrows(system(closed, opened))


def test_pods_of_other_namespaces_need_a_selector_of_namespaces() -> None:
    own, every = {"podSelector": {}}, {"podSelector": {}, "namespaceSelector": {}}
    reach = [
        {source for source, target, _ in arrows(system(isolated("a", "Ingress", ingress=[{"from": [peer]}])))
         if target == "a"}
        for peer in (own, every)
    ]  # fmt: skip
    assert reach[0] == {"a", "b", "neighbour"}
    assert {"stranger", "dns", "prometheus"} <= reach[1]
    assert "internet" not in reach[1]


def test_both_selectors_of_one_peer_have_to_take_it() -> None:
    peer = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        "podSelector": {"matchLabels": {NAME_LABEL: "prometheus"}},
    }
    found = arrows(system(isolated("a", "Ingress", ingress=[{"from": [peer]}])))
    assert {source for source, target, _ in found if target == "a"} == {"prometheus"}


def test_a_block_of_addresses_has_exceptions_and_no_pods() -> None:
    block = {"ipBlock": {"cidr": "0.0.0.0/0", "except": ["10.0.0.0/8", "169.254.0.0/16"]}}
    found = arrows(system(isolated("a", "Egress", egress=[{"to": [block]}])))
    assert {target for source, target, _ in found if source == "a"} == {"internet"}


def test_a_port_is_one_of_its_protocol() -> None:
    found = arrows(system(isolated("a", "Egress", egress=[{"ports": [{"port": 53, "protocol": "UDP"}]}])))
    assert {port for source, _, port in found if source == "a"} == {"53/UDP"}


@pytest.mark.parametrize(
    ("selector", "takes"),
    [
        ({}, True),
        ({"matchLabels": {"a": "1"}}, True),
        ({"matchLabels": {"a": "1", "b": "2"}}, False),
        ({"matchExpressions": [{"key": "a", "operator": "In", "values": ["1", "2"]}]}, True),
        ({"matchExpressions": [{"key": "a", "operator": "NotIn", "values": ["1"]}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "b", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_selectors(selector: dict[str, Any], takes: bool) -> None:
    assert selects(selector, {"a": "1"}) is takes
