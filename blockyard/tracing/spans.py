"""Spans for services that know nothing of OpenTelemetry: begun under a W3C trace context, ended, sent elsewhere.

Off, which is the default, nothing of OpenTelemetry is imported, and every span is NO_SPAN. Owns this process's tracer,
as `logging` owns its handlers; `blockyard.tracing.process` sets it. `blockyard.tracing.export` makes and sends spans.

No text of a prompt or an answer is ever passed to a span.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.contract.trace import TraceContext

    # Takes a name, the parent, attributes, whether the span is of a call from outside, and how many seconds ago it
    # began. Returns NO_SPAN where sampling decides against the span.
    Begin = Callable[[str, TraceContext | None, Mapping[str, "Attribute"], bool, float], "Span"]

Attribute = str | bool | int | float | tuple[str, ...]

# Variables that say where to send traces: the first that is set counts.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Span:
    """One piece of work in a trace. This one records nothing, and stands wherever nobody traces: NO_SPAN.

    Attributes are called as fields of the log; those without a dot get our prefix.
    """

    __slots__ = ()

    @property
    def context(self) -> TraceContext | None:
        """The context that other spans hang under; None: nobody records."""
        return None

    @property
    def trace_id(self) -> str | None:
        return None

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes."""

    def add_event(self, name: str, **attributes: Attribute) -> None:
        """Adds an event at this moment."""

    def end(self, *, error: str = "", seconds_ago: float = 0.0) -> None:
        """Ends it, well or with an error. A second end changes nothing."""


NO_SPAN = Span()


_begin: Begin | None = None
_every_step = False


def use_tracer(begin: Begin | None, *, every_step: bool = False) -> None:
    """Makes this process's spans from now on by a tracer's `begin`, or not at all."""
    global _begin, _every_step
    _begin, _every_step = begin, every_step


def is_tracing() -> bool:
    return _begin is not None


def traces_every_step() -> bool:
    """Whether each step of a traced sequence is to have a span of its own."""
    return _every_step


def begin_span(name: str, parent: TraceContext | None, *, seconds_ago: float = 0.0, **attributes: Attribute) -> Span:
    """Begins a span under another one. NO_SPAN where nothing is traced here, or the parent is None."""
    if _begin is None or parent is None:
        return NO_SPAN
    return _begin(name, parent, attributes, False, seconds_ago)


def begin_server_span(name: str, parent: TraceContext | None, **attributes: Attribute) -> Span:
    """Begins the span of a call from outside: under its caller's, else as a trace of its own if it is sampled."""
    if _begin is None:
        return NO_SPAN
    return _begin(name, parent, attributes, True, 0.0)


def begin_root_span(name: str, **attributes: Attribute) -> Span:
    """Begins a trace of its own, of what no call has asked for, if it is sampled."""
    if _begin is None:
        return NO_SPAN
    return _begin(name, None, attributes, False, 0.0)


def active_trace_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the headers of the span that a client's user is in, if their process has OpenTelemetry."""
    # A caller that is in a span has imported it.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - only where the user has it
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
