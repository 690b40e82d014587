"""The Helm chart: what its values do.

tests/integration/deploy/test_rendered.py compares it with what kustomize renders.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from k8s.chart_values import PLACES, VALUES
from k8s.generate_chart import CHART, OPTIONS
from tests.unit.deploy import chart
from tests.unit.deploy.chart import RELEASE, leaves, render, render_one
from tests.unit.deploy.labels import VERSION, is_labelled
from tests.unit.deploy.manifests import Manifests
from tests.unit.deploy.policies import RULES, lets_the_protocol_through
from tests.unit.deploy.reachability import ADDED

GIVEN: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
MERGED = tuple(value for value in PLACES if value.endswith(".resources"))
# Together they have every place that a value goes to.
CONTEXTS: tuple[dict[str, Any], ...] = (
    {"overlay": "gpu", "components": dict.fromkeys({*OPTIONS} - {"gpuRdma", "modelVolume", "queueScaling"}, True)},
    {"overlay": "gpu-tp", "components": {"gpuRdma": True, "modelVolume": True, "queueScaling": True}},
    {"overlay": "leader-worker-set"},
)


def names(values: dict[str, Any], path: str = "") -> set[str]:
    """The names of the values that can be given."""
    return {
        name
        for key, value in values.items()
        for name in (names(value, f"{path}{key}.") if isinstance(value, dict) and value else {path + key})
    }


def nested(name: str, value: Any) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    for key in reversed(name.split(".")):
        value = {key: value}
    return value


def told(manifests: Manifests) -> dict[str, list[str]]:
    """The rules that are broken."""
    return {rule.__name__: breaches for rule in RULES if (breaches := list(rule(manifests)))}


def test_helm_has_nothing_to_say_about_it() -> None:
    assert chart.lint() == []


def test_its_version_is_that_of_the_package() -> None:
    written = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (written["version"], written["appVersion"]) == (VERSION, VERSION)


def test_as_it_is_it_keeps_to_every_rule() -> None:
    made = render_one({})
    assert told(made) == {}
    assert not list(lets_the_protocol_through(made))
    assert not list(is_labelled(made, **{"instance": RELEASE, "managed-by": "Helm"}))


def test_every_value_has_a_place() -> None:
    images = {f"images.{image}.{part}" for image in ("control", "worker") for part in ("name", "tag")}
    settings = {f"settings.{name}" for name in ("model", "gateway", "scheduler", "worker")}
    options = {f"components.{option}" for option in OPTIONS}
    assert names(GIVEN) == {"overlay", *PLACES, *images, *settings, *options}
    # An empty value leaves what the overlay and the components say, and no component is on by itself.
    assert not any(GIVEN["components"].values())


def test_a_value_goes_to_its_places_and_nowhere_else() -> None:
    given = {name: {"limits": {"own": "1"}} if name in MERGED else "own" for name in PLACES}
    values = [{**context, **nested(name, value)} for context in CONTEXTS for name, value in given.items()]
    plain = [leaves(made) for made in render(*CONTEXTS) if isinstance(made, Manifests)]
    changed: dict[str, set[tuple[str, ...]]] = {name: set() for name in PLACES}
    for i, made in enumerate(render(*values)):
        assert isinstance(made, Manifests), made
        before, after = plain[i // len(given)], leaves(made)
        name = [*given][i % len(given)]
        for address, value in after.items():
            if before.get(address) != value:
                changed[name].add(address[:-2] if name in MERGED else address)
                assert value == ("1" if name in MERGED else "own")
        # What a text takes the place of is below it.
        gone = before.keys() - after.keys()
        assert all(any(address[: len(place)] == place for place in changed[name]) for address in gone)
    assert changed == {name: {place for place, value in VALUES.items() if value == name} for name in PLACES}


def test_images_are_those_that_are_named() -> None:
    images = {"control": {"name": "r.example/blockyard-control", "tag": 0.1}, "worker": {"tag": "0.1-cuda"}}
    made = render_one({**CONTEXTS[0], "images": images})
    wanted = {"gateway": "r.example/blockyard-control:0.1", "worker": "blockyard-worker:0.1-cuda"}
    assert {service: made.container(service)["image"] for service in wanted} == wanted
    everywhere = {container["image"] for service in made.workloads for container in made.containers(service)}
    assert everywhere == {*wanted.values()}
    assert told(made) == {}


def test_settings_are_texts_and_restart_those_who_read_them() -> None:
    settings = {"scheduler": {"BLOCKYARD_MAX_NUM_SEQS": 1000000, "BLOCKYARD_DEVICE": "auto"}}
    plain, made, other = render({}, {"settings": settings}, {"model": "/models/other"})
    assert isinstance(plain, Manifests) and isinstance(made, Manifests) and isinstance(other, Manifests)
    configured = made.configured(made.container("scheduler"))
    assert (configured["BLOCKYARD_MAX_NUM_SEQS"], configured["BLOCKYARD_DEVICE"]) == ("1000000", "auto")
    assert configured["BLOCKYARD_LOG_FORMAT"] == "json"
    for changed, read_by in ((made, {"scheduler"}), (other, {"gateway", "scheduler"})):
        restarted = {name for name in plain.workloads if changed.template(name) != plain.template(name)}
        assert restarted == read_by
    assert told(made) == {}


def test_all_that_users_change_together_keeps_to_every_rule() -> None:
    made = render_one(
        {
            "overlay": "gpu",
            "components": dict.fromkeys(("apiKeys", "tls", "monitoring", "queueScaling", "modelVolume"), True),
            "model": "/mnt/models/qwen",
            "settings": {"scheduler": {"BLOCKYARD_SWAP_SPACE_GIB": 16}},
            "gateway": {"minReplicas": 3, "resources": {"limits": {"memory": "2Gi"}}},
            "worker": {
                "maxReplicas": 8,
                "resources": {"requests": {"memory": "48Gi"}, "limits": {"memory": "48Gi"}},
                "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
            },
            "storage": {"models": {"className": "nfs", "size": "500Gi"}},
            "secrets": {"apiKeys": "ours", "tls": "our-certificate"},
            "imagePullSecrets": [{"name": "registry"}],
        }
    )
    assert told(made) == {}
    assert not list(lets_the_protocol_through(made, ADDED["monitoring"]))
    assert made.container("worker")["resources"] == {
        "requests": {"cpu": "4", "memory": "48Gi"},
        "limits": {"memory": "48Gi", "nvidia.com/gpu": "1"},
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"overlay": "tpu"}, "'/overlay': value must be one of 'cpu', 'gpu'"),
        ({"components": {"monitorin": True}}, "'monitorin' not allowed"),
        ({"replicas": 3}, "'replicas' not allowed"),
        ({"components": {"gpuRdma": True}}, "components.gpuRdma does not go with the overlay cpu"),
        (
            {"overlay": "leader-worker-set", "components": {"queueScaling": True}},
            "components.queueScaling does not go with the overlay leader-worker-set",
        ),
        (
            {"components": {"modelFromHub": True, "modelVolume": True}},
            "components.modelFromHub does not go with components.modelVolume",
        ),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    (answer,) = render(values)
    assert isinstance(answer, str)
    assert message in answer
