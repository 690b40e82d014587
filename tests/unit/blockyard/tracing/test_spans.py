"""The facade of tracing: contexts as they travel, nothing while it is off, and what turns it on."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from blockyard.configuration import TracingSettings
from blockyard.contract.codec.trace import decode_trace_context, encode_trace_context
from blockyard.contract.trace import TraceContext, read_trace_context
from blockyard.tracing import spans as tracing
from blockyard.tracing.process import TracingUnavailable, start_tracing, stop_tracing, traced_process
from blockyard.tracing.spans import NO_SPAN, active_trace_metadata, begin_server_span, begin_span
from tests.kit.processes.spans import CALLER, recorded_spans

if TYPE_CHECKING:
    from collections.abc import Iterator

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(autouse=True)
def off_afterwards() -> Iterator[None]:
    yield
    stop_tracing()


@pytest.mark.parametrize(
    ("headers", "context"),
    [
        ([("traceparent", f"00-{TRACE}-{SPAN}-01")], TraceContext(f"00-{TRACE}-{SPAN}-01")),
        ([(b"Traceparent", f"00-{TRACE}-{SPAN}-00".encode())], TraceContext(f"00-{TRACE}-{SPAN}-00")),
        ([("traceparent", f" 00-{TRACE}-{SPAN}-01 "), ("tracestate", "a=1")], (f"00-{TRACE}-{SPAN}-01", "a=1")),
        ([("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "a" * 513)], (f"00-{TRACE}-{SPAN}-01", "")),
        # A later version has more behind the flags.
        ([("traceparent", f"01-{TRACE}-{SPAN}-01-what-else")], (f"01-{TRACE}-{SPAN}-01-what-else", "")),
        ([("tracestate", "a=1")], None),
        ([("traceparent", "")], None),
        ([("traceparent", f"ff-{TRACE}-{SPAN}-01")], None),
        ([("traceparent", f"00-{'0' * 32}-{SPAN}-01")], None),
        ([("traceparent", f"00-{TRACE}-{'0' * 16}-01")], None),
        ([("traceparent", f"00-{TRACE.upper()}-{SPAN}-01")], None),
        ([("traceparent", f"00-{TRACE}-{SPAN}-01" + "x" * 100)], None),
        ([("x-bin", b"\xff\x00")], None),
        ([], None),
    ],
)
def test_what_a_caller_says_of_its_span(
    headers: list[tuple[str | bytes, str | bytes]], context: TraceContext | None
) -> None:
    assert read_trace_context(headers) == context


def test_a_context_travels_in_a_message() -> None:
    message = encode_trace_context(CALLER)
    assert message is not None
    assert decode_trace_context(message) == CALLER
    assert CALLER.trace_id == TRACE
    assert encode_trace_context(None) is None
    assert decode_trace_context(type(message)()) is None
    assert decode_trace_context(type(message)(traceparent="nonsense")) is None


def test_off_there_is_one_span_for_all_and_it_records_nothing() -> None:
    assert not tracing.is_tracing()
    for span in (begin_span("work", CALLER, seconds_ago=1.0, n=1), begin_server_span("call", CALLER, n=1)):
        assert span is NO_SPAN
        span.set(n=1)
        span.add_event("moment", n=1)
        span.end(error="failed")
        assert span.context is None
        assert span.trace_id is None


def test_without_a_parent_nothing_begins_inside() -> None:
    with recorded_spans() as recorder:
        assert begin_span("work", None) is NO_SPAN
        begin_server_span("call", None).end()
        assert [span.name for span in recorder.seen.spans] == ["call"]


def test_neither_setting_nor_variable_is_off() -> None:
    start_tracing("gateway", TracingSettings(), {})
    assert not tracing.is_tracing()


@pytest.mark.parametrize("variable", tracing.ENDPOINT_VARIABLES)
def test_the_variables_of_opentelemetry_turn_it_on(variable: str) -> None:
    environment = {variable: "http://127.0.0.1:1"}
    for off in ({"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}):
        start_tracing("gateway", TracingSettings(), {**environment, **off})
        assert not tracing.is_tracing()
    start_tracing("gateway", TracingSettings(trace_every_step=True), environment)
    assert tracing.is_tracing()
    assert tracing.traces_every_step()
    stop_tracing()
    assert not tracing.is_tracing()
    assert not tracing.traces_every_step()


def test_what_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "blockyard.tracing.export", None)
    with pytest.raises(TracingUnavailable, match=r"install 'blockyard\[tracing\]'"):
        start_tracing("gateway", TracingSettings(trace_endpoint="http://127.0.0.1:1"), {})
    start_tracing("gateway", TracingSettings(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert "install 'blockyard[tracing]'" in caplog.text
    assert not tracing.is_tracing()


def test_a_process_is_traced_as_long_as_its_work_lasts() -> None:
    with traced_process("worker", TracingSettings(trace_endpoint="http://127.0.0.1:1")):
        assert tracing.is_tracing()
    assert not tracing.is_tracing()


def imported_by(program: str) -> set[str]:
    """The modules that are there after a program."""
    code = f"{program}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(run.stdout.split())


@pytest.mark.parametrize("module", ["blockyard", "scheduler_service.server"])
def test_off_nothing_of_opentelemetry_is_imported(module: str) -> None:
    start = (
        "from blockyard.configuration import TracingSettings\nfrom blockyard.tracing.process import start_tracing\n"
        "start_tracing('x', TracingSettings())"
    )
    assert not {name for name in imported_by(f"import {module}\n{start}") if name.startswith("opentelemetry")}


def test_off_the_gateway_has_no_more_of_it_than_its_http_library() -> None:
    found = {name for name in imported_by("import gateway.server") if name.startswith("opentelemetry")}
    assert not {name for name in found if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))}


def test_a_client_tells_the_span_that_it_is_called_in() -> None:
    assert active_trace_metadata() == ()
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("user")
    with tracer.start_as_current_span("outer") as span:
        context = span.get_span_context()
        told = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        assert dict(active_trace_metadata()) == {"traceparent": told}
    with trace.use_span(trace.NonRecordingSpan(trace.SpanContext(1, 2, is_remote=False))):
        assert dict(active_trace_metadata())["traceparent"].endswith("-00")


def test_a_client_without_opentelemetry_looks_for_nothing() -> None:
    program = "from blockyard.tracing.spans import active_trace_metadata\nassert active_trace_metadata() == ()"
    assert not {name for name in imported_by(program) if name.startswith("opentelemetry")}
