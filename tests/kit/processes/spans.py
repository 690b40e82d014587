"""Spans as a test looks at them, and a recorder of those that this process makes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from blockyard.configuration import TracingSettings
from blockyard.contract.trace import TraceContext
from blockyard.tracing.export import OtlpTracer, make_provider
from blockyard.tracing.spans import use_tracer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, Span

PREFIX = "blockyard."
CALLER = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1")
UNSAMPLED_CALLER = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00")


@dataclass(frozen=True)
class SeenSpan:
    """A span that has ended. Ids are in hex, "" for no parent; our attributes are without their prefix."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_seconds: float
    end_seconds: float
    kind: str
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[str, ...] = ()
    error: str = ""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_seconds - self.start_seconds


class Seen:
    """Some spans, and questions about them."""

    def __init__(self, spans: Iterable[SeenSpan]) -> None:
        self.spans = sorted(spans, key=lambda span: span.start_seconds)

    def named(self, name: str, service: str = "") -> list[SeenSpan]:
        """Those of a name, in the order of their beginnings."""
        return [span for span in self.spans if span.name == name and service in span.service]

    def one(self, name: str, service: str = "") -> SeenSpan:
        """The only one of a name."""
        [found] = self.named(name, service)
        return found

    @property
    def trace_ids(self) -> set[str]:
        """Their traces."""
        return {span.trace_id for span in self.spans}

    @property
    def services(self) -> set[str]:
        """Who made them."""
        return {span.service for span in self.spans}

    def of_trace(self, trace_id: str) -> Seen:
        """Those of one trace."""
        return Seen(span for span in self.spans if span.trace_id == trace_id)


def without_prefix(attributes: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Attributes as our code names them."""
    return {name.removeprefix(PREFIX): value for name, value in attributes}


class _Open(SpanProcessor):
    """Those that have not ended."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        self.names[span.get_span_context().span_id] = span.name

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        assert context is not None
        del self.names[context.span_id]


class Recorder:
    """The spans that this process has ended."""

    def __init__(self, exporter: InMemorySpanExporter, unended: _Open) -> None:
        self._exporter = exporter
        self._open = unended

    def check_all_ended(self) -> None:
        """Fails with the names of spans that were begun and forgotten."""
        assert not self._open.names, list(self._open.names.values())

    @property
    def seen(self) -> Seen:
        """Those so far."""
        return Seen(map(_seen, self._exporter.get_finished_spans()))


def _seen(span: ReadableSpan) -> SeenSpan:
    context = span.get_span_context()
    assert context is not None
    return SeenSpan(
        service=str(span.resource.attributes["service.name"]),
        name=span.name,
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{span.parent.span_id:016x}" if span.parent else "",
        start_seconds=(span.start_time or 0) / 1e9,
        end_seconds=(span.end_time or 0) / 1e9,
        kind=span.kind.name,
        attributes=without_prefix((span.attributes or {}).items()),
        events=tuple(event.name for event in span.events),
        error=span.status.description or "",
    )


@contextmanager
def recorded_spans(*, ratio: float = 1.0, every_step: bool = False) -> Iterator[Recorder]:
    """Records the spans that this process makes meanwhile."""
    exporter = InMemorySpanExporter()
    settings = TracingSettings(trace_ratio=ratio, trace_every_step=every_step)
    provider = make_provider("test", settings, SimpleSpanProcessor(exporter), {})
    unended = _Open()
    provider.add_span_processor(unended)
    use_tracer(OtlpTracer(provider).begin, every_step=every_step)
    try:
        yield Recorder(exporter, unended)
    finally:
        use_tracer(None)
