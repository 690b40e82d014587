"""Names of metrics: well formed, each of one service, and none in a guide or a manifest that nobody tells."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from blockyard.service.metrics import COMMON, PROCESS, Kind, Metric
from gateway.observe.metrics import CATALOGUE as GATEWAY
from scheduler_service.catalogue import CATALOGUE as SCHEDULER
from worker_service.observe.metrics import CATALOGUE as WORKER

ROOT = Path(__file__).parents[3]
OURS = (*COMMON, *GATEWAY, *SCHEDULER, *WORKER)
WATCH = ROOT / "docs" / "guides" / "watch.md"
DASHBOARD = ROOT / "docs" / "reference" / "dashboard.json"
READERS = [
    ROOT / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "docs").rglob("*.json"),
    *(ROOT / "k8s").rglob("*.yaml"),
    *(ROOT / "docker").rglob("*.yml"),
    *(ROOT / "docker").rglob("*.json"),
]
# What is told has a unit, or counts what its name says.
UNITS = ("_seconds", "_bytes", "_tokens", "_total", "_info")


def samples_of(metric: Metric) -> set[str]:
    suffixes = ("_bucket", "_count", "_sum", "") if metric.kind is Kind.HISTOGRAM else ("",)
    return {metric.name + suffix for suffix in suffixes}


def test_each_metric_has_one_owner() -> None:
    names = Counter(metric.name for metric in (*OURS, *PROCESS))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("metric", OURS, ids=lambda metric: metric.name)
def test_a_name_and_its_labels_are_well_formed(metric: Metric) -> None:
    assert re.fullmatch(r"blockyard(_[a-z]+)+", metric.name)
    assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith((*UNITS, "_sequences"))
    assert not {"request_id", "tenant", "client", "sequence_id", "le"} & set(metric.labels)
    assert metric.help.endswith(".")
    assert "|" not in metric.help


def test_no_name_is_that_of_a_part_of_another() -> None:
    """A histogram `x` has samples `x_count`: no other metric may have that name."""
    samples = Counter(name for metric in OURS for name in samples_of(metric))
    assert [name for name, count in samples.items() if count > 1] == []


@pytest.mark.parametrize("reader", READERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_read_is_told(reader: Path) -> None:
    known = {name for metric in OURS for name in samples_of(metric)}
    # Not paths, hosts, modules and one package, which begin alike.
    named = re.findall(r"(?<![\w./-])blockyard_[a-z_]+\b(?![./])", reader.read_text(encoding="utf-8"))
    assert sorted(set(named) - known - {"blockyard_kernels"}) == []


@pytest.mark.parametrize("reader", [WATCH, DASHBOARD], ids=lambda path: path.name)
def test_every_label_that_a_query_names_is_one_of_the_metric(reader: Path) -> None:
    metrics = {name: metric for metric in OURS for name in samples_of(metric)}
    text = reader.read_text(encoding="utf-8").replace('\\"', '"')
    queries = re.findall(r"(blockyard_\w+)\{([^}]*)\}", text)
    assert queries
    for name, selector in queries:
        labels = set(re.findall(r"(\w+)=", selector)) - {"job"}
        assert labels <= set(metrics[name].labels), name


def test_the_guide_has_alerts_and_a_scrape_that_are_yaml() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", WATCH.read_text(encoding="utf-8"), re.DOTALL)
    scrape, alerts = (yaml.safe_load(block) for block in blocks)
    assert scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 4
    for rule in rules:
        assert "blockyard_" in rule["expr"]
        assert rule["annotations"]["summary"].endswith(".")


def test_the_charts_of_the_dashboard_lie_beside_each_other() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        x, y, w, h = (panel["gridPos"][side] for side in "xywh")
        cells = {(x + across, y + down) for across in range(w) for down in range(h)}
        assert not cells & taken
        assert x + w <= 24
        taken |= cells
        assert panel["type"] == "row" or panel["targets"]
