"""Spans by OpenTelemetry: whose child each is, what it says, which are recorded, and that they reach a collector."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from blockyard.configuration import TracingSettings
from blockyard.tracing import export as trace_export
from blockyard.tracing.process import start_tracing, stop_tracing, traced_process
from blockyard.tracing.spans import NO_SPAN, begin_server_span, begin_span
from tests.kit.fakes.collector import Collector
from tests.kit.processes.spans import CALLER, UNSAMPLED_CALLER, recorded_spans

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    stop_tracing()


def test_a_call_is_its_callers_child_and_work_is_the_calls() -> None:
    with recorded_spans() as recorder:
        call = begin_server_span("call", CALLER, request_id="r", **{"gen_ai.request.model": "demo"})
        assert call.context is not None
        assert call.context.tracestate == CALLER.tracestate
        assert call.trace_id == CALLER.trace_id
        work = begin_span("work", call.context, n=2)
        work.add_event("half", share=0.5)
        work.set(finish_reasons=("stop", "length"))
        work.end(error="broken")
        call.end()
        seen = recorder.seen
    assert seen.trace_ids == {CALLER.trace_id}
    outer, inner = seen.one("call"), seen.one("work")
    assert (outer.parent_id, outer.kind) == (CALLER.traceparent[36:52], "SERVER")
    assert outer.attributes == {"request_id": "r", "gen_ai.request.model": "demo"}
    assert (inner.parent_id, inner.kind) == (outer.span_id, "INTERNAL")
    assert inner.attributes == {"n": 2, "finish_reasons": ("stop", "length")}
    assert (inner.events, inner.error, outer.error) == (("half",), "broken", "")


def test_spans_can_be_told_of_afterwards() -> None:
    with recorded_spans() as recorder:
        before = time.time()
        begin_span("work", CALLER, seconds_ago=10.0).end(seconds_ago=4.0)
        after = time.time()
        [span] = recorder.seen.spans
    # The collector's clock has nanoseconds, this one microseconds.
    assert before - 10 - 1e-5 <= span.start_seconds <= after - 10 + 1e-5
    assert before - 4 - 1e-5 <= span.start_seconds + span.seconds <= after - 4 + 1e-5


def test_a_second_end_changes_nothing() -> None:
    with recorded_spans() as recorder:
        span = begin_span("work", CALLER)
        span.end()
        span.end(error="late")
        assert recorder.seen.one("work").error == ""


def test_a_caller_decides_for_itself_and_the_ratio_for_the_others() -> None:
    with recorded_spans(ratio=0.0) as recorder:
        assert begin_server_span("call", None) is NO_SPAN
        assert begin_server_span("call", UNSAMPLED_CALLER) is NO_SPAN
        begin_server_span("call", CALLER).end()
        assert len(recorder.seen.spans) == 1
    with recorded_spans(ratio=1.0) as recorder:
        assert begin_server_span("call", UNSAMPLED_CALLER) is NO_SPAN
        begin_server_span("call", None).end()
        assert recorder.seen.one("call").parent_id == ""
    with recorded_spans(ratio=0.5) as recorder:
        for _ in range(200):
            begin_server_span("call", None).end()
        assert 50 < len(recorder.seen.spans) < 150


@pytest.mark.parametrize(
    ("endpoint", "environment", "kind"),
    [
        ("http://c:4317", {}, GrpcExporter),
        ("http://c:4318", {}, HttpExporter),
        ("http://c:4318/", {}, HttpExporter),
        ("http://c:4317", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, HttpExporter),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, GrpcExporter),
        ("http://c:4318", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc"}, GrpcExporter),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, HttpExporter),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, GrpcExporter),
    ],
)
def test_the_protocol_is_told_or_known_by_the_port(
    endpoint: str, environment: dict[str, str], kind: type[SpanExporter]
) -> None:
    exporter = trace_export.make_exporter(endpoint, environment)
    assert isinstance(exporter, kind)
    exporter.shutdown()


def test_an_endpoint_without_a_scheme_is_in_the_clear() -> None:
    assert trace_export.with_scheme("collector:4317") == "http://collector:4317"
    assert trace_export.with_scheme("https://collector:4317") == "https://collector:4317"
    assert trace_export.with_scheme("") == ""


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_spans_reach_a_collector_at_the_latest_at_the_end(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with Collector() as collector:
        endpoint = collector.grpc_endpoint if protocol == "grpc" else collector.http_endpoint
        with traced_process("worker", TracingSettings(trace_endpoint=endpoint)):
            begin_span("work", CALLER, n=1, text="é", share=0.5, names=("a", "b")).end(error="no")
        span = collector.seen.one("work")
    assert (span.service, span.trace_id, span.error) == ("blockyard-worker", CALLER.trace_id, "no")
    assert span.attributes == {"n": 1, "text": "é", "share": 0.5, "names": ("a", "b")}


def test_a_collector_that_is_away_is_told_once_and_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        endpoint = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        start_tracing("worker", TracingSettings(trace_endpoint=endpoint))
        begin_span("work", CALLER).end()
        # The port takes the connection and never answers: without the limit this would not end.
        stop_tracing(0.2)
    assert [thread.name for thread in threading.enumerate() if "trace export" in thread.name] == []
    assert caplog.messages.count("traces cannot be sent") == 1


class Flaky(SpanExporter):
    """Fails as it is told to."""

    def __init__(self) -> None:
        self.result = SpanExportResult.SUCCESS
        self.is_closed = False

    def export(self, spans: Any) -> SpanExportResult:
        return self.result

    def shutdown(self) -> None:
        self.is_closed = True


def test_failing_to_send_is_told_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    flaky = Flaky()
    exporter = trace_export.ReportingExporter(flaky, "http://c:4317")
    for result in (SpanExportResult.SUCCESS, *[SpanExportResult.FAILURE] * 3, *[SpanExportResult.SUCCESS] * 2):
        flaky.result = result
        assert exporter.export([]) is result
    assert caplog.messages == ["traces cannot be sent", "traces are sent again"]
    exporter.shutdown()
    assert flaky.is_closed
