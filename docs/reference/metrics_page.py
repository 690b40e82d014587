"""Writes the page of metrics from the services' catalogues. Run `generate.py`, which imports this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockyard.service.metrics import COMMON, PROCESS, Kind, Metric
from gateway.observe.gen_ai_metrics import CATALOGUE as GEN_AI_METRICS
from gateway.observe.metrics import CATALOGUE as GATEWAY_METRICS
from gateway.observe.vllm_metrics import CATALOGUE as VLLM_METRICS
from scheduler_service.catalogue import CATALOGUE as SCHEDULER_METRICS
from worker_service.observe.metrics import CATALOGUE as WORKER_METRICS

if TYPE_CHECKING:
    from collections.abc import Iterable

METRICS = """\
# Metrics
{note}

Each service answers Prometheus at `/metrics`: [watch it](../guides/watch.md) tells where, and what to look at. Every
metric has one owner, so that sums over all services count nothing twice; the common ones are every service's. What a
gateway tells with the labels `model` and `state` or `replica` is the scheduler's state, for who scrapes gateways alone:
take the `max` over gateways, not the sum.

**Stable.** A name, its unit, its labels and their meaning stay as they are within a major version. New metrics, and new
values of labels, may come. One that is to go is told in the changelog, and stays for two minor versions beside what
replaces it. No label is a request, a client or a tenant, nor anything else that grows with them.

Times are in seconds. A counter ends with `_total`, and begins at zero with its process, or with its replica where
`replica` is a label. Reasons are those of [errors](errors.md).
{sections}"""
METRICS_SECTION = """
## {title}

| metric | labels | what it is |
|---|---|---|
{rows}
"""
BUCKETS = """
## Buckets

| histogram | upper bounds of its buckets, beside infinity |
|---|---|
{rows}
"""
VLLM = """
## From vLLM

| vLLM | here |
|---|---|
{rows}

With `--vllm-metric-names` the gateway tells these under vLLM's own names too, labelled `model_name` and `engine`, the
number of a replica (0 for what is of no single one). Bounds of histograms are ours. What vLLM has beyond them is not
there under its name.

{told}

The model's name is a label of `blockyard_model_info` and of the scheduler's state at a gateway. Join it elsewhere:
`rate(blockyard_output_tokens_total[1m]) * on(instance) group_left(model) blockyard_model_info`.
"""
GEN_AI = """
## From OpenTelemetry

With the variable `OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental` the gateway gives OpenTelemetry's metrics
for servers of generative AI too, under the names that Prometheus has for them, with the bounds and, as labels, the
attributes that the [conventions](https://github.com/open-telemetry/semantic-conventions-genai) advise.
`gen_ai_provider_name` is `blockyard`, `gen_ai_operation_name` is `chat` or `text_completion`, and the model's name is
that of the adapter where a request has one. Only generations are measured: texts that become vectors, scores or labels
are not. The address of the server is Prometheus' `instance`. The conventions may still change, and these metrics with
them.

| OpenTelemetry | here | labels | what it is |
|---|---|---|---|
{rows}
"""
OPENTELEMETRY = (
    "gen_ai.server.request.duration",
    "gen_ai.server.time_per_output_token",
    "gen_ai.server.time_to_first_token",
)
# What its users look for, and what they find here.
EQUIVALENTS = (
    ("vllm:num_requests_running", 'blockyard_requests{state="running"}'),
    ("vllm:num_requests_waiting", 'blockyard_requests{state="waiting"}'),
    ("vllm:num_requests_swapped", 'blockyard_sequences{state="swapped"}'),
    (
        "vllm:kv_cache_usage_perc",
        'sum(blockyard_blocks{pool="device",state="used"}) / sum(blockyard_blocks{pool="device"})',
    ),
    ("vllm:prefix_cache_queries", "blockyard_prefix_cache_query_tokens_total"),
    ("vllm:prefix_cache_hits", "blockyard_prefix_cache_hit_tokens_total"),
    ("vllm:num_preemptions_total", "blockyard_preemptions_total"),
    ("vllm:prompt_tokens_total", "blockyard_prompt_tokens_total"),
    ("vllm:generation_tokens_total", "blockyard_generated_tokens_total"),
    ("vllm:iteration_tokens_total", "blockyard_step_tokens"),
    ("vllm:time_to_first_token_seconds", "blockyard_time_to_first_token_seconds"),
    ("vllm:inter_token_latency_seconds", "blockyard_inter_token_latency_seconds"),
    ("vllm:request_time_per_output_token_seconds", "blockyard_time_per_output_token_seconds"),
    ("vllm:e2e_request_latency_seconds", "blockyard_request_latency_seconds"),
    ("vllm:request_queue_time_seconds", "blockyard_queue_seconds"),
    ("vllm:request_prompt_tokens", "blockyard_request_prompt_tokens"),
    ("vllm:request_generation_tokens", "blockyard_request_output_tokens"),
    ("vllm:request_success_total", "blockyard_finished_sequences_total"),
    ("http_requests_total", "blockyard_http_requests_total"),
)


def _metric_row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}`<br>{metric.kind} | {labels} | {metric.help} |"


def _metrics_section(title: str, metrics: Iterable[Metric]) -> str:
    return METRICS_SECTION.format(title=title, rows="\n".join(map(_metric_row, metrics)))


def _buckets_row(metric: Metric) -> str:
    bounds = ", ".join(f"{bound:.6f}".rstrip("0").rstrip(".") for bound in metric.bounds)
    return f"| `{metric.name}` | {bounds} |"


def metrics_page(note: str) -> str:
    """What each service tells Prometheus."""
    services = {"Gateway": GATEWAY_METRICS, "Scheduler": SCHEDULER_METRICS, "Worker": WORKER_METRICS}
    histograms = [each for metrics in services.values() for each in metrics if each.kind is Kind.HISTOGRAM]
    sections = [_metrics_section(title, metrics) for title, metrics in services.items()]
    sections.append(_metrics_section("Every service", (*COMMON, *PROCESS)))
    sections.append(BUCKETS.format(rows="\n".join(map(_buckets_row, histograms))))
    rows = "\n".join(f"| `{theirs}` | `{ours}` |" for theirs, ours in EQUIVALENTS)
    told = ", ".join(f"`{metric.name}`" for metric in VLLM_METRICS)
    sections.append(VLLM.format(rows=rows, told=told))
    pairs = zip(OPENTELEMETRY, GEN_AI_METRICS, strict=True)
    rows = "\n".join(f"| `{theirs}` {_metric_row(metric)}" for theirs, metric in pairs)
    sections.append(GEN_AI.format(rows=rows))
    return METRICS.format(note=note, sections="".join(sections))
