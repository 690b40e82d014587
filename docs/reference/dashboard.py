"""Writes what docs/guides/watch.md says is worth a look: a dashboard for Grafana, and its alerts for Kubernetes.

`generate.py` imports this.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any, NamedTuple

WIDTH, HEIGHT, COLUMNS = 8, 8, 3
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RATE = "[$__rate_interval]"


class Panel(NamedTuple):
    """A chart: PromQL by legend, and a unit as Grafana calls it."""

    title: str
    unit: str
    queries: dict[str, str]


def _quantiles(metric: str) -> dict[str, str]:
    rates = f"sum by (le) (rate({metric}_bucket{RATE}))"
    return {f"p{percent}": f"histogram_quantile(0.{percent}, {rates})" for percent in (50, 95, 99)}


def _rates(metric: str, label: str) -> dict[str, str]:
    return {"{{" + label + "}}": f"sum by ({label}) (rate({metric}{RATE}))"}


def _share(part: str, whole: str) -> dict[str, str]:
    return {"share": f"{part} / {whole}"}


ROWS: dict[str, tuple[Panel, ...]] = {
    "What clients see": (
        Panel("Time to first token", "s", _quantiles("blockyard_time_to_first_token_seconds")),
        Panel("Inter-token latency", "s", _quantiles("blockyard_inter_token_latency_seconds")),
        Panel("Request latency", "s", _quantiles("blockyard_request_latency_seconds")),
        Panel(
            "Tokens a second",
            "short",
            {
                "output": f"sum(rate(blockyard_output_tokens_total{RATE}))",
                "prompts": f"sum(rate(blockyard_prompt_tokens_total{RATE}))",
            },
        ),
        Panel("Errors told", "reqps", _rates("blockyard_errors_total", "reason")),
        Panel("Live streams", "short", {"{{instance}}": "blockyard_live_streams"}),
    ),
    "Load": (
        Panel("Requests", "short", {"{{state}}": "sum by (state) (blockyard_requests)"}),
        Panel("Tokens that wait", "short", {"tokens": "sum(blockyard_waiting_tokens)"}),
        Panel("Time in the queue", "s", _quantiles("blockyard_queue_seconds")),
        Panel(
            "KV blocks in use, by pool",
            "percentunit",
            {"{{pool}}": 'sum by (pool) (blockyard_blocks{state="used"}) / sum by (pool) (blockyard_blocks)'},
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            _share(
                f"sum(rate(blockyard_prefix_cache_hit_tokens_total{RATE}))",
                f"sum(rate(blockyard_prefix_cache_query_tokens_total{RATE}))",
            ),
        ),
        Panel("Preemptions", "ops", _rates("blockyard_preemptions_total", "mode")),
    ),
    "The same by a scrape of the gateways alone": (
        Panel("Requests", "short", {"{{state}}": "max by (model, state) (blockyard_model_requests)"}),
        Panel(
            "KV blocks in use, by replica",
            "percentunit",
            {"{{replica}}": "max by (model, replica) (blockyard_model_kv_usage_ratio)"},
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            _share(
                f"sum(max by (model, replica) (rate(blockyard_model_prefix_cache_hit_tokens_total{RATE})))",
                f"sum(max by (model, replica) (rate(blockyard_model_prefix_cache_query_tokens_total{RATE})))",
            ),
        ),
    ),
    "Steps": (
        Panel(
            "Mean time of a step's phases, at workers",
            "s",
            {
                "{{phase}}": f"sum by (phase) (rate(blockyard_worker_step_seconds_sum{RATE}))"
                f" / sum by (phase) (rate(blockyard_worker_step_seconds_count{RATE}))"
            },
        ),
        Panel(
            "Mean time of a step's phases, at the scheduler",
            "s",
            {
                "{{phase}}": f"sum by (phase) (rate(blockyard_step_seconds_sum{RATE}))"
                f" / sum by (phase) (rate(blockyard_step_seconds_count{RATE}))"
            },
        ),
        Panel(
            "Mean size of a step",
            "short",
            {
                "sequences": f"sum(rate(blockyard_step_sequences_sum{RATE}))"
                f" / sum(rate(blockyard_step_sequences_count{RATE}))",
                "tokens": f"sum(rate(blockyard_step_tokens_sum{RATE})) / sum(rate(blockyard_step_tokens_count{RATE}))",
            },
        ),
    ),
    "Adapters (LoRA)": (
        Panel("Adapters, by replica", "short", {"{{replica}} {{state}}": "blockyard_lora_adapters"}),
        Panel("Waiting for a slot", "short", _rates("blockyard_lora_passed_seconds_total", "adapter")),
        Panel("Time to load one", "s", _quantiles("blockyard_lora_load_seconds")),
    ),
    "What goes wrong": (
        Panel("Replicas", "short", {"ready": "sum(blockyard_ready_replicas)", "{{state}}": "blockyard_workers > 0"}),
        Panel(
            "Workers lost", "short", {"{{cause}}": f"sum by (cause) (increase(blockyard_worker_losses_total{RATE}))"}
        ),
        Panel("Tokens computed again", "short", _rates("blockyard_recomputed_tokens_total", "lost")),
        Panel("Sent away", "reqps", _rates("blockyard_refused_requests_total", "reason")),
        Panel("Failed", "reqps", _rates("blockyard_failed_requests_total", "reason")),
        Panel("From a cancel to free blocks", "s", _quantiles("blockyard_cancel_to_free_seconds")),
    ),
    "Processes": (
        Panel("Processors", "short", {"{{instance}}": f"rate(process_cpu_seconds_total{RATE}) and blockyard_ready"}),
        Panel("Memory", "bytes", {"{{instance}}": "process_resident_memory_bytes and blockyard_ready"}),
        Panel("File descriptors", "short", {"{{instance}}": "process_open_fds and blockyard_ready"}),
    ),
}


def _chart(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
        for place, (legend, query) in enumerate(panel.queries.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "gridPos": {"x": 0, "y": y, "w": WIDTH * COLUMNS, "h": 1},
                "panels": [],
            }
        )
        y += 1
        for place, panel in enumerate(row):
            down, across = divmod(place, COLUMNS)
            panels.append(_chart(panel, len(panels) + 1, across * WIDTH, y + down * HEIGHT))
        y += -(-len(row) // COLUMNS) * HEIGHT
    return panels


def dashboard() -> str:
    """The file to import."""
    variable = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    model = {
        "title": "Blockyard",
        "uid": "blockyard",
        "schemaVersion": 39,
        "tags": ["blockyard"],
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": _panels(),
    }
    return json.dumps(model, indent=1) + "\n"


RULE = """\
# Written by docs/reference/generate.py: the alerts of docs/guides/watch.md, where Prometheus' operator runs.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: blockyard
  labels:
    app.kubernetes.io/part-of: blockyard
spec:
"""


def prometheus_rule(guide: str) -> str:
    """The guide's alerts as a resource."""
    (groups,) = re.findall(r"```yaml\n(groups:\n.*?)```", guide, re.DOTALL)
    return RULE + textwrap.indent(groups, "  ")
