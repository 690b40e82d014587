"""What components do that no rule looks at: fetching, mounting, scraping and scaling."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from gateway.observe.metrics import CATALOGUE as GATEWAY_CATALOGUE
from scheduler_service.catalogue import CATALOGUE
from scheduler_service.config import SchedulerConfiguration
from tests.kit.fakes.fake_hub import fake_hub
from tests.unit.deploy import manifests
from tests.unit.deploy.groups import makes_whole_groups
from tests.unit.deploy.manifests import HAS_KUBECTL, K8S, NAME_LABEL, OVERLAYS, ROOT, Manifests, read_yaml
from tests.unit.deploy.reachability import selects

if TYPE_CHECKING:
    from pathlib import Path

needs_kubectl = [] if HAS_KUBECTL else [pytest.mark.e2e]
FROM_HUB = K8S / "components" / "model-from-hub"
NAME = "someone/small"
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture(params=[pytest.param(name, marks=needs_kubectl) for name in OVERLAYS])
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


def containers_of(service: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the component adds to a service: the container that fetches, and the one that serves."""
    (patch,) = read_yaml(FROM_HUB / f"{service}.yaml")
    spec = patch["spec"]["template"]["spec"]
    return spec["initContainers"][0], spec["containers"][0]


def literal_environment(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "BLOCKYARD_"))}
    return subprocess.run(
        command, cwd=ROOT, env=kept | environment, check=False, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(("service", "kind"), [("gateway", "tokenizer"), ("worker", "weights")])
def test_what_is_fetched_before_the_start_is_found_without_the_network(service: str, kind: str, tmp_path: Path) -> None:
    """Runs the manifest's own command against a hub, and the service's look-up against none."""
    repository = tmp_path / "repository"
    repository.mkdir()
    for name in FILES:
        (repository / name).write_text(json.dumps({"name": name}))
    fetches, serves = containers_of(service)
    model = {"BLOCKYARD_MODEL": NAME, "BLOCKYARD_REVISION": "main"}
    home = {"HF_HOME": str(tmp_path / "hub")}
    with fake_hub({NAME: repository}) as hub:
        command = [sys.executable, *fetches["command"][1:], *fetches["args"]]
        done = run(command, {**literal_environment(fetches), **model, **home, "HF_ENDPOINT": hub.url})
        assert done.returncode == 0, done.stderr
        assert ("model.safetensors" in hub.fetched) == (kind == "weights")
    look_up = "import sys; from blockyard.model_files import resolve_model; print(resolve_model(*sys.argv[1:]))"
    found = run([sys.executable, "-c", look_up, NAME, "main", kind], {**literal_environment(serves), **home})
    assert found.returncode == 0, found.stderr
    assert literal_environment(serves)["HF_HUB_OFFLINE"] == "1"
    assert literal_environment(serves)["HF_HOME"] == literal_environment(fetches)["HF_HOME"]


def test_only_who_fetches_may_write_and_has_the_token() -> None:
    for service in ("gateway", "worker"):
        fetches, serves = containers_of(service)
        read_only = [
            {mount["mountPath"]: mount.get("readOnly", False) for mount in container["volumeMounts"]}["/hub"]
            for container in (fetches, serves)
        ]
        assert read_only == [False, True]
        assert [item["name"] for item in fetches["env"] if "valueFrom" in item] == ["HF_TOKEN"]
        assert not [item for item in serves["env"] if "valueFrom" in item]


def test_a_model_volume_is_only_read() -> None:
    for service in ("gateway", "worker"):
        (patch,) = read_yaml(K8S / "components" / "model-volume" / f"{service}.yaml")
        spec = patch["spec"]["template"]["spec"]
        assert [mount["readOnly"] for mount in spec["containers"][0]["volumeMounts"]] == [True]
        (path,) = [value for _, _, value in manifests.literals(K8S / "components" / "model-volume")]
        assert path.startswith(spec["containers"][0]["volumeMounts"][0]["mountPath"] + "/")


def test_who_fetches_runs_the_version_that_was_chosen(overlay: str, tmp_path: Path) -> None:
    """An image chosen in an overlay, before the component comes, and one chosen after it."""
    rendered = manifests.render_with(overlay, ("model-from-hub",), tmp_path)
    gateway = rendered.container("gateway")["image"]
    assert {rendered.pod(service)["initContainers"][0]["image"] for service in ("gateway", "worker")} == {gateway}


def test_every_pod_is_scraped_once(overlay: str, tmp_path: Path) -> None:
    rendered = manifests.render_with(overlay, ("monitoring",), tmp_path)
    (monitor,) = rendered.of_kind("ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    scraped = [
        item["spec"]["selector"][NAME_LABEL]
        for item in rendered.of_kind("Service").values()
        if selects(monitor["spec"]["selector"], item["metadata"]["labels"])
        for port in item["spec"]["ports"]
        if port["name"] == endpoint["port"]
    ]
    assert sorted(scraped) == ["blockyard-gateway", "blockyard-scheduler", "blockyard-worker"]


def test_ports_of_metrics_are_those_of_the_settings(overlay: str, tmp_path: Path) -> None:
    rendered = manifests.render_with(overlay, ("monitoring",), tmp_path)
    for service in ("gateway", "scheduler", "worker"):
        settings = rendered.configured(rendered.container(service))
        assert settings[f"BLOCKYARD_{service.upper()}_METRICS_PORT"] == str(rendered.ports(service)["http-metrics"])


def test_all_services_trace_to_one_collector(overlay: str, tmp_path: Path) -> None:
    rendered = manifests.render_with(overlay, ("tracing",), tmp_path)
    services = ("gateway", "scheduler", "worker")
    told = {rendered.configured(rendered.container(name))["BLOCKYARD_TRACE_ENDPOINT"] for name in services}
    (endpoint,) = told
    policy = rendered.of_kind("NetworkPolicy")["blockyard-traces"]
    rule = policy["spec"]["egress"][0]
    (peer,) = rule["to"]
    name = peer["podSelector"]["matchLabels"][NAME_LABEL]
    namespace = peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert endpoint == f"http://{name}.{namespace}:{rule['ports'][0]['port']}"


def test_workers_are_scaled_from_none_up_and_gateways_stay_ready(overlay: str, tmp_path: Path) -> None:
    rendered = manifests.render_with(overlay, ("queue-scaling",), tmp_path)
    (scaler,) = rendered.of_kind("ScaledObject").values()
    target = scaler["spec"]["scaleTargetRef"]
    assert target["name"] in rendered.of_kind(target["kind"])
    assert 0 == scaler["spec"]["minReplicaCount"] < scaler["spec"]["maxReplicaCount"]
    # Only a gateway that is ready without a worker is sent the requests that start one.
    assert rendered.configured(rendered.container("gateway"))["BLOCKYARD_STARTS_ON_DEMAND"] == "true"


def test_workers_are_scaled_by_what_waits_and_by_what_runs() -> None:
    (scaler,) = read_yaml(K8S / "components" / "queue-scaling" / "scaled-object.yaml")
    triggers = {trigger["name"]: trigger for trigger in scaler["spec"]["triggers"]}
    queries = {name: trigger["metadata"]["query"] for name, trigger in triggers.items()}
    assert queries == {
        "no-worker": "sum(blockyard_gateway_waiting_requests)",
        "waiting": "sum(blockyard_waiting_tokens)",
        "running": "sum(blockyard_sequences)",
    }
    assert {"blockyard_waiting_tokens", "blockyard_sequences"} <= {metric.name for metric in CATALOGUE}
    assert "blockyard_gateway_waiting_requests" in {metric.name for metric in GATEWAY_CATALOGUE}
    # A worker that has all it can take asks for another one before that.
    at_most = SchedulerConfiguration().scheduler.max_num_seqs
    assert 0 < int(triggers["running"]["metadata"]["threshold"]) < at_most
    assert all(trigger["metricType"] == "AverageValue" for trigger in triggers.values())


def test_alerts_and_a_dashboard_come_with_the_metrics(overlay: str, tmp_path: Path) -> None:
    rendered = manifests.render_with(overlay, ("monitoring",), tmp_path)
    (rule,) = rendered.of_kind("PrometheusRule").values()
    guide = (ROOT / "docs" / "guides" / "watch.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(groups:.*?)```", guide, re.DOTALL)
    assert rule["spec"] == yaml.safe_load(block)
    board = rendered.of_kind("ConfigMap")["blockyard-dashboard"]
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    written = (ROOT / "docs" / "reference" / "dashboard.json").read_text(encoding="utf-8")
    assert board["data"] == {"blockyard.json": written}


def worker_of(overlay: str) -> tuple[Manifests, dict[str, Any]]:
    rendered = manifests.render(K8S / "overlays" / overlay)
    return rendered, rendered.container("worker")


@pytest.mark.parametrize(
    ("name", "num_gpus"),
    [pytest.param(*each, marks=needs_kubectl) for each in (("gpu", 1), ("gpu-tp", 1), ("gpu-nvlink", 4))],
)
def test_a_gpu_worker_has_a_gpu(name: str, num_gpus: int) -> None:
    rendered, worker = worker_of(name)
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(num_gpus)
    scheduler = rendered.configured(rendered.container("scheduler"))
    assert scheduler["BLOCKYARD_DEVICE"] == "cuda"
    gibibytes = int(worker["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert gibibytes > num_gpus * int(scheduler["BLOCKYARD_SWAP_SPACE_GIB"])


@pytest.mark.parametrize("name", [pytest.param("cpu", marks=needs_kubectl)])
def test_a_cpu_worker_has_as_many_threads_as_processors(name: str) -> None:
    rendered, worker = worker_of(name)
    assert "nvidia.com/gpu" not in worker["resources"]["limits"]
    assert rendered.configured(rendered.container("scheduler"))["BLOCKYARD_DEVICE"] == "cpu"
    (threads,) = [item for item in worker["env"] if item["name"] == "BLOCKYARD_NUM_THREADS"]
    assert threads["valueFrom"]["resourceFieldRef"] == {
        "containerName": "worker",
        "resource": "requests.cpu",
        "divisor": "1",
    }


@pytest.mark.parametrize("name", [pytest.param("gpu-tp", marks=needs_kubectl)])
def test_half_a_group_is_told(name: str) -> None:
    rendered, _ = worker_of(name)
    pod = "spec.template.spec"
    shared = [volume["name"] for volume in rendered.pod("worker")["volumes"]].index("shared-memory")
    wrong: tuple[tuple[str, Any], ...] = (
        ("spec.replicas", 3),
        (f"{pod}.containers.0.env", None),
        (f"{pod}.containers.0.env.0.valueFrom.fieldRef.fieldPath", "metadata.name"),
        (f"{pod}.containers.0.envFrom", None),
        (f"{pod}.volumes.{shared}.emptyDir.medium", None),
    )
    assert not list(makes_whole_groups(rendered))
    for path, value in wrong:
        assert list(makes_whole_groups(rendered.changed("StatefulSet", "blockyard-worker", path, value))), path


@pytest.mark.parametrize("name", [pytest.param("gpu-nvlink", marks=needs_kubectl)])
def test_half_a_pod_of_workers_is_told(name: str) -> None:
    rendered, _ = worker_of(name)
    container = "spec.template.spec.containers.0"
    wrong: tuple[tuple[str, Any], ...] = (
        (f"{container}.args.3", "--num-workers=6"),
        (f"{container}.args.4", "--worker-address=0.0.0.0:50088"),
        (f"{container}.resources.limits.nvidia~com/gpu", "1"),
        (f"{container}.env.0.valueFrom.fieldRef.fieldPath", "metadata.uid"),
        (f"{container}.envFrom", None),
        (f"{container}.volumeMounts.0", {"name": "tmp", "mountPath": "/dev/shm"}),
    )
    assert not list(makes_whole_groups(rendered))
    for path, value in wrong:
        assert list(makes_whole_groups(rendered.changed("StatefulSet", "blockyard-worker", path, value))), path


@pytest.mark.parametrize("overlay", [pytest.param("gpu-tp", marks=needs_kubectl)])
def test_a_leader_worker_set_has_the_pods_of_the_stateful_set(overlay: str, tmp_path: Path) -> None:
    plain = manifests.render(K8S / "overlays" / overlay)
    rendered = manifests.render_with(overlay, ("leader-worker-set",), tmp_path)
    assert rendered.workloads.keys() == plain.workloads.keys()
    assert not rendered.of_kind("StatefulSet")
    pods = [each.pod("worker") for each in (plain, rendered)]
    names = [[item["name"] for item in pod["containers"][0].pop("env")] for pod in pods]
    assert names == [["BLOCKYARD_WORKER_INDEX"], ["BLOCKYARD_WORKER_GROUP", "BLOCKYARD_WORKER_INDEX"]]
    assert pods[0] == pods[1]
    path = "spec.leaderWorkerTemplate"
    for key, value in (("size", 4), ("restartPolicy", "RecreateGroupOnPodRestart"), ("leaderTemplate", {})):
        wrong = manifests.render_with(overlay, ("leader-worker-set",), tmp_path)
        assert list(makes_whole_groups(wrong.changed("LeaderWorkerSet", "blockyard-worker", f"{path}.{key}", value)))


@pytest.mark.parametrize("overlay", [pytest.param("gpu-tp", marks=needs_kubectl)])
def test_rdma_is_a_device_and_no_right(overlay: str, tmp_path: Path) -> None:
    plain = manifests.render(K8S / "overlays" / overlay).container("worker")
    worker = manifests.render_with(overlay, ("gpu-rdma",), tmp_path).container("worker")
    limits = worker["resources"]["limits"]
    assert limits == {**plain["resources"]["limits"], "rdma/ib": "1"}
    assert worker["securityContext"] == plain["securityContext"]
    added = {item["name"] for item in worker["env"]} - {item["name"] for item in plain["env"]}
    assert added == {"NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_NET_GDR_LEVEL"}
