"""Declares the gateway's Prometheus metrics and measures each request.

Counts each token of an answer once, even if several clients read it or one reads it again. Knows neither fronts nor the
scheduler.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from blockyard.contract.sampling import FinishReason
from blockyard.errors import Reason
from blockyard.service.metrics import READY, Registry, counter, declared_in, gauge, geometric, histogram
from gateway.observe import gen_ai_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blockyard.contract.models import Model
    from blockyard.contract.request import Position
    from blockyard.service.metrics import Metric
    from gateway.observe.scheduler_readings import SchedulerReadings
    from gateway.readings import ReplicaReading

WHOLE = "whole"
_TOKENS = tuple(float(4**power) for power in range(11))
_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_FIRST_TOKEN_SECONDS = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 320.0),
)

REQUESTS = counter(
    "blockyard_requests_total",
    "Requests that were begun here, valid ones; of a call for vectors, scores or labels each input is one.",
)
FINISHED_REQUESTS = counter(
    "blockyard_finished_requests_total",
    f"Requests that ended here, by result: `{WHOLE}`, or the reason of the error that ended them. One that"
    " is resumed at another gateway may end at both.",
    "result",
)
FINISHED_SEQUENCES = counter(
    "blockyard_finished_sequences_total",
    "Sequences of answers that are whole, by `stop` (an end token, stop token or stop string), `length`, `abort` or"
    " `error`.",
    "reason",
)
INVALID_TOOL_CALLS = counter(
    "blockyard_invalid_tool_calls_total",
    "What looked like a call of a tool in an answer and was none, as one of an unknown tool is, or ended too early, by"
    " the model's dialect.",
    "dialect",
)
LIVE_REQUESTS = gauge("blockyard_live_requests", "Requests that run, somebody reading them or not.")
LIVE_STREAMS = gauge("blockyard_live_streams", "Answers that somebody reads or waits for.")
OUTPUT_TOKENS = counter(
    "blockyard_output_tokens_total",
    "Tokens of answers, each counted once when it is sent, however many read it; none twice after a failure.",
)
PROMPT_TOKENS = histogram("blockyard_request_prompt_tokens", "Tokens of the prompt of a request.", _TOKENS)
ANSWER_TOKENS = histogram(
    "blockyard_request_output_tokens", "Tokens of a whole answer, of all its sequences together.", _TOKENS
)
TIME_TO_FIRST_TOKEN = histogram(
    "blockyard_time_to_first_token_seconds",
    "From a request's arrival to that of its first token: tokenizing, queue, prefill, and failures outlived.",
    _FIRST_TOKEN_SECONDS,
)
INTER_TOKEN_LATENCY = histogram(
    "blockyard_inter_token_latency_seconds",
    "Time between tokens of a sequence as a stream sends them; tokens sent at once share the time before them.",
    _TOKEN_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = histogram(
    "blockyard_time_per_output_token_seconds",
    "Mean time for each token after the first, of a whole answer, streamed or not.",
    _TOKEN_SECONDS,
)
REQUEST_LATENCY = histogram(
    "blockyard_request_latency_seconds",
    "From a request's arrival to the end of its answer, if that is whole.",
    geometric(0.01, 1000),
)
ERRORS = counter(
    "blockyard_errors_total",
    "Errors that clients were sent, by API (`grpc` or `http`) and reason; those of probes do not count.",
    "api",
    "reason",
)
HTTP_REQUESTS = counter(
    "blockyard_http_requests_total",
    "HTTP requests that ended, by method, path as it is declared (`other` where none is) and status code.",
    "method",
    "path",
    "code",
)
ATTACHED = gauge("blockyard_scheduler_attached", "Whether the gateway is attached to its scheduler: 1 or 0.")
SCHEDULER_LOSSES = counter(
    "blockyard_scheduler_losses_total", "How often the scheduler, or the connection to it, was lost."
)
MODEL_INFO = gauge(
    "blockyard_model_info", "Always 1; not there before the model's facts have come.", "model", "determinism_id"
)
WAITING_REQUESTS = gauge(
    "blockyard_gateway_waiting_requests",
    "Requests here for a model that no worker would compute now; they wait until one is ready. A model that starts on"
    " demand needs a worker while this is above 0.",
    "model",
)

MODEL_REQUESTS = gauge(
    "blockyard_model_requests",
    "The scheduler's live requests, of all gateways: `waiting` for a replica, or `running`, which a replica has taken.",
    "model",
    "state",
)
MODEL_KV_USAGE = gauge(
    "blockyard_model_kv_usage_ratio", "Share of a replica's KV blocks on the device in use, 0 to 1.", "model", "replica"
)
MODEL_QUERY_TOKENS = counter(
    "blockyard_model_prefix_cache_query_tokens_total",
    "Prompt tokens that were looked up in a replica's prefix cache.",
    "model",
    "replica",
)
MODEL_HIT_TOKENS = counter(
    "blockyard_model_prefix_cache_hit_tokens_total",
    "Prompt tokens that were found in a replica's prefix cache.",
    "model",
    "replica",
)

CATALOGUE = declared_in(globals())

# The reasons of the errors that the current task's HTTP call has answered with.
_call_errors: ContextVar[list[Reason]] = ContextVar("call_errors")


def collect_errors() -> list[Reason]:
    """Begins a call. Returns the list to which `note_error` appends in this task and in the tasks that it creates."""
    errors: list[Reason] = []
    _call_errors.set(errors)
    return errors


def note_error(reason: Reason) -> None:
    """Notes the reason of an error that the current task's call answers with."""
    if (errors := _call_errors.get(None)) is not None:
        errors.append(reason)


class MeasuredRequest(NamedTuple):
    """The facts about a request by which its metrics are labelled.

    `operation`: its name in OpenTelemetry's conventions; empty for an input of a pooling call, and for a request that
    another gateway served before. `trace_id`: the trace for exemplars; None if the request is not traced.
    """

    operation: str = ""
    model: str = ""
    trace_id: str | None = None


_PLAIN = MeasuredRequest()


class GatewayMetrics:
    """Holds the values of the metrics. Only the event loop writes them.

    Attributes:
        clock: the clock of all requests, in seconds.
        registry: renders the metrics for scrapes.
        gen_ai: the metrics under OpenTelemetry's names; None: they are off.
        time_to_first_token, inter_token_latency, time_per_output_token, request_latency: histograms, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = registry = Registry("gateway", CATALOGUE)
        self.gen_ai: gen_ai_metrics.GenAiMetrics | None = None
        self.requests = registry.counter(REQUESTS)
        # Create the series of all reasons at 0: an alert only sees a first error as an increase from 0.
        self.finished = registry.counter(FINISHED_REQUESTS, (WHOLE,), *((str(reason),) for reason in Reason))
        self.sequences = registry.counter(FINISHED_SEQUENCES, *((reason.value,) for reason in FinishReason))
        self.invalid_tool_calls = registry.counter(INVALID_TOOL_CALLS)
        self.output_tokens = registry.counter(OUTPUT_TOKENS)
        self.prompt_tokens = registry.histogram(PROMPT_TOKENS)
        self.answer_tokens = registry.histogram(ANSWER_TOKENS)
        self.time_to_first_token = registry.histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token_latency = registry.histogram(INTER_TOKEN_LATENCY)
        self.time_per_output_token = registry.histogram(TIME_PER_OUTPUT_TOKEN)
        self.request_latency = registry.histogram(REQUEST_LATENCY)
        self.errors = registry.counter(ERRORS, *((api, str(reason)) for api in ("grpc", "http") for reason in Reason))
        self.http_requests = registry.counter(HTTP_REQUESTS)
        self.scheduler_losses = registry.counter(SCHEDULER_LOSSES)

    def watch(
        self,
        *,
        num_requests: Callable[[], int],
        num_readers: Callable[[], int],
        is_attached: Callable[[], bool],
        is_ready: Callable[[], bool],
        models: Callable[[], Sequence[Model]],
        num_waiting: Callable[[], Mapping[tuple[str, ...], float]],
    ) -> None:
        """Sets the functions that compute the gauges at each scrape."""
        read = self.registry.read
        read(LIVE_REQUESTS, num_requests)
        read(LIVE_STREAMS, num_readers)
        read(ATTACHED, lambda: int(is_attached()))
        read(READY, lambda: int(is_ready()))
        read(WAITING_REQUESTS, num_waiting)
        read(MODEL_INFO, lambda: {(card.name, card.determinism_id): 1.0 for card in models()})

    def watch_schedulers(self, readings: SchedulerReadings) -> None:
        """Adds the schedulers' load to each scrape of the gateway. A scheduler that does not answer has no metrics."""
        read = self.registry.read
        self.registry.before_scrape = readings.fetch

        def of_replicas(read_value: Callable[[ReplicaReading], float]) -> Callable[[], dict[tuple[str, ...], float]]:
            return lambda: {
                (name, str(each.replica_id)): read_value(each)
                for name, reading in readings.by_model.items()
                for each in reading.replicas
            }

        def requests() -> dict[tuple[str, ...], float]:
            counts: dict[tuple[str, ...], float] = {}
            for name, reading in readings.by_model.items():
                counts[name, "waiting"] = reading.num_waiting_requests
                counts[name, "running"] = reading.num_running_requests
            return counts

        read(MODEL_REQUESTS, requests)
        read(MODEL_KV_USAGE, of_replicas(lambda replica: replica.kv_usage))
        read(MODEL_QUERY_TOKENS, of_replicas(lambda replica: replica.num_queried_tokens))
        read(MODEL_HIT_TOKENS, of_replicas(lambda replica: replica.num_cached_tokens))

    def begin_request(
        self, num_prompt_tokens: int, arrived_at: float, request: MeasuredRequest = _PLAIN
    ) -> RequestMeter:
        """Counts a request that begins here, and returns its meter. `arrived_at`: by the clock."""
        self.requests.add()
        self.prompt_tokens.observe(num_prompt_tokens, trace_id=request.trace_id)
        return RequestMeter(self, arrived_at, request)

    def resume_request(self, trace_id: str | None = None) -> RequestMeter:
        """Returns the meter of a request that another gateway served before. Its latency is unknown here."""
        return RequestMeter(self, None, MeasuredRequest(trace_id=trace_id))

    def on_grpc_error(self, reason: Reason) -> None:
        self.errors.add("grpc", str(reason))


class RequestMeter:
    """Measures one request and its answer.

    Args:
        metrics: the metrics to write to.
        began_at: the request's arrival by the metrics' clock; None if another gateway served the request before.
        request: what the metrics tell of the request.
    """

    __slots__ = ("_began_at", "_first_at", "_metrics", "_num_read", "_parsed", "_read_at", "_request")

    def __init__(self, metrics: GatewayMetrics, began_at: float | None, request: MeasuredRequest = _PLAIN) -> None:
        self._metrics = metrics
        self._request = request
        self._began_at = began_at
        self._first_at: float | None = None
        # By sequence index: the number of tokens read, and the time at which the last one was read.
        self._num_read: dict[int, int] = {}
        self._read_at: dict[int, float] = {}
        self._parsed: set[int] = set()

    def on_read_from(self, positions: Mapping[int, Position]) -> None:
        """Skips the tokens that a resuming client has already: they were counted when they were first read."""
        for index, position in positions.items():
            self._num_read[index] = max(self._num_read.get(index, 0), position.num_tokens)
            # Time without a reader is not latency.
            self._read_at.pop(index, None)

    def on_first_token(self) -> None:
        """Measures the time to the first token. Idempotent."""
        if self._first_at is None:
            self._first_at = self._metrics.clock()
            if self._began_at is not None:
                seconds = self._first_at - self._began_at
                self._metrics.time_to_first_token.observe(seconds, trace_id=self._request.trace_id)

    def on_tokens_read(self, index: int, num_tokens: int) -> None:
        """Counts the new tokens of the sequence `index`, and measures the time since the last one.

        `num_tokens`: the number of tokens that a reader has read so far.
        """
        num_new = num_tokens - self._num_read.get(index, 0)
        if num_new <= 0:
            return
        metrics, now, before = self._metrics, self._metrics.clock(), self._read_at.get(index)
        self._num_read[index] = num_tokens
        self._read_at[index] = now
        metrics.output_tokens.add(count=num_new)
        if before is not None:
            trace_id = self._request.trace_id
            metrics.inter_token_latency.observe((now - before) / num_new, num_new, trace_id=trace_id)

    def on_finished(self, lengths: Sequence[int], reasons: Sequence[FinishReason]) -> None:
        """Counts a complete answer. `lengths`: tokens of each sequence; `reasons`: why each sequence ended."""
        metrics, now, trace_id = self._metrics, self._metrics.clock(), self._request.trace_id
        metrics.finished.add(WHOLE)
        metrics.answer_tokens.observe(sum(lengths), trace_id=trace_id)
        for reason in reasons:
            metrics.sequences.add(reason.value)
        if self._began_at is None:
            return
        metrics.request_latency.observe(now - self._began_at, trace_id=trace_id)
        self._observe_gen_ai(gen_ai_metrics.REQUEST_DURATION, now - self._began_at)
        if self._first_at is None:
            return
        self._observe_gen_ai(gen_ai_metrics.TIME_TO_FIRST_TOKEN, self._first_at - self._began_at)
        if max(lengths) > 1:
            seconds = (now - self._first_at) / (max(lengths) - 1)
            metrics.time_per_output_token.observe(seconds, trace_id=trace_id)
            self._observe_gen_ai(gen_ai_metrics.TIME_PER_OUTPUT_TOKEN, seconds)

    def on_parsed(self, index: int, dialect: str, num_invalid_calls: int) -> None:
        """Counts the invalid tool calls of the complete sequence `index`. Idempotent."""
        if index not in self._parsed:
            self._parsed.add(index)
            self._metrics.invalid_tool_calls.add(dialect, count=num_invalid_calls)

    def on_failed(self, reason: Reason) -> None:
        self._metrics.finished.add(str(reason))
        if self._began_at is not None:
            seconds = self._metrics.clock() - self._began_at
            self._observe_gen_ai(gen_ai_metrics.REQUEST_DURATION, seconds, str(reason))

    def _observe_gen_ai(self, metric: Metric, seconds: float, error: str = "") -> None:
        """Measures a generation under OpenTelemetry's names, if these are on."""
        operation, model, trace_id = self._request
        if self._metrics.gen_ai is not None and operation:
            self._metrics.gen_ai.of(metric, operation, model, error).observe(seconds, trace_id=trace_id)
