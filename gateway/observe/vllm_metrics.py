"""Serves the gateway's metrics under vLLM's names and labels too, for dashboards made for vLLM. Measures nothing.

The histograms have Blockyard's bounds. The label `engine` is the number of a replica; it is 0 for metrics that belong
to no single replica. The metrics that an endpoint picker of the Gateway API's inference extension reads have one series
each, since it takes one series a pod: those of the load, and `vllm:lora_requests_info` and `vllm:cache_config_info`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from blockyard.service.metrics import Histogram, Metric, counter, declared_in, gauge, histogram
from gateway.observe import metrics as ours

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gateway.observe.scheduler_readings import SchedulerReadings
    from gateway.readings import ReplicaReading, SchedulerReading

_LABELS = ("model_name", "engine")
_WHOLE = "0"

RUNNING = gauge("vllm:num_requests_running", "Requests that a replica has taken.", *_LABELS)
WAITING = gauge("vllm:num_requests_waiting", "Requests that wait for a replica.", *_LABELS)
KV_USAGE = gauge("vllm:kv_cache_usage_perc", "Share of all replicas' KV blocks on devices in use, 0 to 1.", *_LABELS)
GPU_KV_USAGE = gauge("vllm:gpu_cache_usage_perc", "The same under its former name.", *_LABELS)
CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "Always 1; tokens per KV block, and the number of blocks on the devices of all replicas.",
    *(*_LABELS, "block_size", "num_gpu_blocks"),
)
LORA_REQUESTS = gauge(
    "vllm:lora_requests_info",
    "When this was read, in seconds since 1970; adapters of requests that replicas have taken and of requests that"
    " wait, with commas between them, and the most adapters that fit into a step of all replicas.",
    *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
QUERIES = counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", *_LABELS)
HITS = counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", *_LABELS)
PREEMPTIONS = counter("vllm:num_preemptions_total", "Preemptions.", *_LABELS)
PROMPT_TOKENS = counter("vllm:prompt_tokens_total", "Tokens of the prompts of requests begun here.", *_LABELS)
GENERATION_TOKENS = counter("vllm:generation_tokens_total", "Tokens of answers.", *_LABELS)
SUCCESSES = counter("vllm:request_success_total", "Sequences that ended, by reason.", *_LABELS, "finished_reason")


def _like(name: str, original: Metric, help: str) -> Metric:
    return histogram(name, help, original.bounds, *_LABELS)


_HISTOGRAMS: Mapping[str, tuple[Metric, str]] = {
    "vllm:time_to_first_token_seconds": (ours.TIME_TO_FIRST_TOKEN, "From arrival to the first token."),
    "vllm:inter_token_latency_seconds": (ours.INTER_TOKEN_LATENCY, "Time between tokens of a stream."),
    "vllm:time_per_output_token_seconds": (ours.INTER_TOKEN_LATENCY, "The same under its former name."),
    "vllm:request_time_per_output_token_seconds": (ours.TIME_PER_OUTPUT_TOKEN, "Mean time a token of an answer."),
    "vllm:e2e_request_latency_seconds": (ours.REQUEST_LATENCY, "From arrival to the end of the answer."),
    "vllm:request_prompt_tokens": (ours.PROMPT_TOKENS, "Tokens of a prompt."),
    "vllm:request_generation_tokens": (ours.ANSWER_TOKENS, "Tokens of a whole answer."),
}
_OF_HISTOGRAMS = {_like(name, original, help): original for name, (original, help) in _HISTOGRAMS.items()}

CATALOGUE = (*declared_in(globals()), *_OF_HISTOGRAMS)

Labelled = dict[tuple[str, ...], float]


def _lora_labels(reading: SchedulerReading) -> tuple[str, ...]:
    max_loras = reading.max_loras * len(reading.replicas)
    return str(max_loras), ",".join(reading.running_loras), ",".join(reading.waiting_loras)


def add_vllm_names(metrics: ours.GatewayMetrics, readings: SchedulerReadings, model_name: str) -> None:
    registry, whole = metrics.registry, (model_name, _WHOLE)
    registry.extend(CATALOGUE)

    def total(read_value: Callable[[SchedulerReading], float]) -> Callable[[], Labelled]:
        return lambda: {(name, _WHOLE): read_value(reading) for name, reading in readings.by_model.items()}

    def of_replicas(read_value: Callable[[ReplicaReading], float]) -> Callable[[], Labelled]:
        return lambda: {
            (name, str(each.replica_id)): read_value(each)
            for name, reading in readings.by_model.items()
            for each in reading.replicas
        }

    registry.read(RUNNING, total(lambda reading: reading.num_running_requests))
    registry.read(WAITING, total(lambda reading: reading.num_waiting_requests))
    registry.read(KV_USAGE, total(lambda reading: reading.kv_usage))
    registry.read(GPU_KV_USAGE, total(lambda reading: reading.kv_usage))
    registry.read(
        CACHE_CONFIG,
        lambda: {
            (name, _WHOLE, str(reading.block_size), str(reading.num_blocks)): 1.0
            for name, reading in readings.by_model.items()
        },
    )
    registry.read(
        LORA_REQUESTS,
        lambda: {_lora_labels(reading): time.time() for reading in readings.by_model.values()},
    )
    registry.read(QUERIES, of_replicas(lambda replica: replica.num_queried_tokens))
    registry.read(HITS, of_replicas(lambda replica: replica.num_cached_tokens))
    registry.read(PREEMPTIONS, of_replicas(lambda replica: replica.num_preemptions))
    registry.read(PROMPT_TOKENS, lambda: {whole: metrics.prompt_tokens.sum})
    registry.read(GENERATION_TOKENS, lambda: {whole: sum(count for _, count in metrics.output_tokens.samples())})
    registry.read(SUCCESSES, lambda: {(*whole, *labels): count for labels, count in metrics.sequences.samples()})
    sources: dict[Metric, Histogram] = {
        ours.TIME_TO_FIRST_TOKEN: metrics.time_to_first_token,
        ours.INTER_TOKEN_LATENCY: metrics.inter_token_latency,
        ours.TIME_PER_OUTPUT_TOKEN: metrics.time_per_output_token,
        ours.REQUEST_LATENCY: metrics.request_latency,
        ours.PROMPT_TOKENS: metrics.prompt_tokens,
        ours.ANSWER_TOKENS: metrics.answer_tokens,
    }
    for theirs, original in _OF_HISTOGRAMS.items():
        registry.share(theirs, sources[original], *whole)
