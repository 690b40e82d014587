"""Rules about who may come in, and how: keys, certificates and routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.unit.deploy.inference_pool import API_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.deploy.manifests import Manifests


def has_files_that_are_mounted(manifests: Manifests) -> Iterator[str]:
    """Files that settings name lie in a Secret that is mounted to be read, as a folder: only so do changes arrive."""
    for service in manifests.workloads:
        container = manifests.container(service)
        secrets = {volume["name"] for volume in manifests.pod(service)["volumes"] if "secret" in volume}
        mounts = [mount for mount in container["volumeMounts"] if mount["name"] in secrets]
        for mount in mounts:
            if not mount.get("readOnly") or "subPath" in mount:
                yield f"{service}: mounts {mount}"
        folders = {f"{mount['mountPath']}/" for mount in mounts}
        named = {
            name: value
            for name, value in manifests.configured(container).items()
            if name.endswith(("_CERTIFICATE", "_KEY", "_AUTHORITY", "_KEYS_FILE"))
        }
        for name, value in named.items():
            if f"{value.rpartition('/')[0]}/" not in folders:
                yield f"{service}: {name} is {value}, which is in none of {sorted(folders)}"
        if len(named) < len(mounts):
            yield f"{service}: mounts {sorted(folders)} in vain"


def routes_to_what_there_is(manifests: Manifests) -> Iterator[str]:
    """Routes lead to Services' ports or to pools, streams may take their time, and no host has routes of two kinds."""
    hosts: set[str] = set()
    for kind, port_name in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        for name, route in manifests.of_kind(kind).items():
            for rule in route["spec"]["rules"]:
                for target in rule["backendRefs"]:
                    if not _is_there(manifests, port_name, target):
                        yield f"{kind} {name}: leads to {target}"
                if kind == "HTTPRoute" and set(rule.get("timeouts", {"": "default"}).values()) != {"0s"}:
                    yield f"{kind} {name}: ends streams after {rule.get('timeouts')}"
            if shared := hosts.intersection(route["spec"]["hostnames"]):
                yield f"{kind} {name}: {shared} has routes of two kinds"
            hosts.update(route["spec"]["hostnames"])


def _is_there(manifests: Manifests, port_name: str, target: dict[str, Any]) -> bool:
    if target.get("kind") == "InferencePool":
        return target.get("group") == API_GROUP and target["name"] in manifests.of_kind("InferencePool")
    service = manifests.of_kind("Service").get(target["name"], {"spec": {"ports": []}})
    return (port_name, target["port"]) in {(port["name"], port["port"]) for port in service["spec"]["ports"]}


def speaks_as_it_says(manifests: Manifests) -> Iterator[str]:
    """Services say what the gateway speaks: TLS if it has a certificate, else HTTP/2 in the clear for gRPC."""
    has_tls = "BLOCKYARD_TLS_CERTIFICATE" in manifests.configured(manifests.container("gateway"))
    wanted = {"grpc": "https", "http": "https"} if has_tls else {"grpc": "kubernetes.io/h2c", "http": "http"}
    for name in ("blockyard-gateway", "blockyard-gateway-headless"):
        for port in manifests.of_kind("Service").get(name, {"spec": {"ports": []}})["spec"]["ports"]:
            if port["name"] in wanted and port.get("appProtocol") != wanted[port["name"]]:
                yield f"Service {name}: says that {port['name']} speaks {port.get('appProtocol')}"
