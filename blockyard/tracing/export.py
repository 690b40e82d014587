"""Creates spans with OpenTelemetry's SDK and sends them by OTLP. Imported only if tracing is on.

The SDK and the exporters read OpenTelemetry's environment variables themselves: headers, certificates, timeouts, batch
sizes, resource attributes, sampler.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from blockyard.contract.trace import TraceContext
from blockyard.telemetry import EventLogger
from blockyard.tracing.spans import ENDPOINT_VARIABLES, NO_SPAN, Attribute, Span
from blockyard.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blockyard.configuration import TracingSettings

log = EventLogger(__name__)

# Send spans more often than OpenTelemetry's default of five seconds, since a killed process loses unsent spans.
_SEND_EVERY_MILLISECONDS = 1_000
_LAST_WORDS_SECONDS = 0.5
_PREFIX = "blockyard."
_HTTP_PORT = ":4318"


class _RecordedSpan(Span):
    __slots__ = ("_context", "_span")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._context = _to_trace_context(span.get_span_context())

    @property
    def context(self) -> TraceContext | None:
        return self._context

    @property
    def trace_id(self) -> str | None:
        return self._context.trace_id

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_with_prefix(attributes))

    def add_event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _with_prefix(attributes))

    def end(self, *, error: str = "", seconds_ago: float = 0.0) -> None:
        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_nanoseconds(seconds_ago))


def _with_prefix(attributes: Mapping[str, Attribute]) -> dict[str, Attribute]:
    return {name if "." in name else _PREFIX + name: value for name, value in attributes.items()}


def _nanoseconds(seconds_ago: float) -> int:
    return time.time_ns() - int(seconds_ago * 1e9)


def _to_trace_context(context: SpanContext) -> TraceContext:
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    return TraceContext(traceparent, context.trace_state.to_header())


def _to_span_context(context: TraceContext) -> SpanContext:
    _, trace_id, span_id, flags, *_ = context.traceparent.split("-")
    state = TraceState.from_header([context.tracestate]) if context.tracestate else TraceState()
    return SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)), trace_state=state
    )


class OtlpTracer:
    """Creates the spans of one process, sent from a thread. `provider` is not OpenTelemetry's global one."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter | None = None) -> None:
        self._provider = provider
        self._exporter = exporter
        self._tracer = provider.get_tracer("blockyard", __version__)

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Mapping[str, Attribute],
        is_server: bool,
        seconds_ago: float,
    ) -> Span:
        """Begins a span; returns NO_SPAN if it is not sampled."""
        # Start from an empty context: the parent is the argument, never the current span.
        above = (
            trace.set_span_in_context(NonRecordingSpan(_to_span_context(parent)), Context()) if parent else Context()
        )
        span = self._tracer.start_span(
            name,
            above,
            SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            _with_prefix(attributes),
            start_time=_nanoseconds(seconds_ago),
        )
        return _RecordedSpan(span) if span.is_recording() else NO_SPAN

    def stop(self, seconds: float) -> None:
        """Sends the remaining spans; waits at most `seconds` for the collector."""
        sending = threading.Thread(target=self._provider.shutdown, name="trace export", daemon=True)
        sending.start()
        sending.join(seconds)
        if sending.is_alive() and self._exporter is not None:
            # The exporter keeps retrying until it is shut down.
            self._exporter.shutdown()
            sending.join(_LAST_WORDS_SECONDS)


class ReportingExporter(SpanExporter):
    """Wraps an exporter; logs one line when sending begins to fail, and one when it works again."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            log.warning("traces cannot be sent", endpoint=self._endpoint, num_spans=len(spans))
        elif self._is_failing and not is_failing:
            log.info("traces are sent again", endpoint=self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def make_tracer(service: str, settings: TracingSettings, environment: Mapping[str, str] = os.environ) -> OtlpTracer:
    """Creates the tracer of a process's settings. Raises ImportError if its exporter is not installed."""
    endpoint = with_scheme(settings.trace_endpoint)
    exporter = make_exporter(endpoint, environment)
    destination = endpoint or "as the environment says"
    # Silence the exporters' line for each attempt; ReportingExporter logs each change.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    delay = None if environment.get("OTEL_BSP_SCHEDULE_DELAY") else _SEND_EVERY_MILLISECONDS
    processor = BatchSpanProcessor(ReportingExporter(exporter, destination), schedule_delay_millis=delay)
    log.info("tracing", endpoint=destination, ratio=settings.trace_ratio)
    return OtlpTracer(make_provider(service, settings, processor, environment), exporter)


def make_provider(
    service: str, settings: TracingSettings, processor: SpanProcessor, environment: Mapping[str, str] = os.environ
) -> TracerProvider:
    """Creates the provider, which samples spans, sets their resource and passes them to the processor."""
    resource = Resource.create(
        {
            SERVICE_NAME: environment.get("OTEL_SERVICE_NAME") or f"blockyard-{service}",
            SERVICE_VERSION: __version__,
            SERVICE_INSTANCE_ID: f"{socket.gethostname()}/{os.getpid()}",
        }
    )
    # A ratio of 1 is OpenTelemetry's default; leave the sampler to its environment variables.
    sampler = None if settings.trace_ratio == 1 else ParentBased(TraceIdRatioBased(settings.trace_ratio))
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


def with_scheme(endpoint: str) -> str:
    """Returns an endpoint as a URL; without a scheme it is http, without TLS."""
    return endpoint if not endpoint or "://" in endpoint else f"http://{endpoint}"


def make_exporter(endpoint: str, environment: Mapping[str, str]) -> SpanExporter:
    """Creates an HTTP exporter if variables or port say so, else a gRPC one. Empty endpoint: from the variables."""
    if _is_http(endpoint, environment):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - a choice

        # The exporter adds no path to an endpoint that is given in code.
        return OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - a choice

    return OTLPSpanExporter(endpoint or None)


def _is_http(endpoint: str, environment: Mapping[str, str]) -> bool:
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol:
        return protocol.startswith("http")
    endpoints = (endpoint, *(environment.get(variable, "") for variable in ENDPOINT_VARIABLES))
    return next(filter(None, endpoints), "").rstrip("/").endswith(_HTTP_PORT)
