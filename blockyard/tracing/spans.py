"""Spans for services, independent of OpenTelemetry, with W3C trace contexts as parents.

By default tracing is off: OpenTelemetry is not imported, and every span is NO_SPAN. This module holds the process's
tracer; `blockyard.tracing.process` sets it, and `blockyard.tracing.export` creates and sends spans.

No text of a prompt or an answer is ever passed to a span.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blockyard.contract.trace import TraceContext

    # Arguments: name, parent, attributes, whether it is the span of an incoming call, and how many seconds ago it
    # began. Returns NO_SPAN if the span is not sampled.
    Begin = Callable[[str, TraceContext | None, Mapping[str, "Attribute"], bool, float], "Span"]

Attribute = str | bool | int | float | tuple[str, ...]

# Environment variables with the trace endpoint; the first one that is set is used.
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class Span:
    """One piece of work in a trace. This base class records nothing; NO_SPAN is its instance.

    Attributes have the names of log fields; names without a dot get the prefix `blockyard.`.
    """

    __slots__ = ()

    @property
    def context(self) -> TraceContext | None:
        """The context for child spans; None: nothing is recorded."""
        return None

    @property
    def trace_id(self) -> str | None:
        return None

    def set(self, **attributes: Attribute) -> None:
        """Adds attributes."""

    def add_event(self, name: str, **attributes: Attribute) -> None:
        """Adds an event at this moment."""

    def end(self, *, error: str = "", seconds_ago: float = 0.0) -> None:
        """Ends the span. `error`: its failure; empty: success. A second call does nothing."""


NO_SPAN = Span()


_begin: Begin | None = None
_every_step = False


def use_tracer(begin: Begin | None, *, every_step: bool = False) -> None:
    """Sets the function that begins this process's spans from now on; None: tracing is off."""
    global _begin, _every_step
    _begin, _every_step = begin, every_step


def is_tracing() -> bool:
    return _begin is not None


def traces_every_step() -> bool:
    """Returns whether each step of a traced sequence gets its own span."""
    return _every_step


def begin_span(name: str, parent: TraceContext | None, *, seconds_ago: float = 0.0, **attributes: Attribute) -> Span:
    """Begins a child span. Returns NO_SPAN if tracing is off or the parent is None."""
    if _begin is None or parent is None:
        return NO_SPAN
    return _begin(name, parent, attributes, False, seconds_ago)


def begin_server_span(name: str, parent: TraceContext | None, **attributes: Attribute) -> Span:
    """Begins the span of an incoming call, as a child of the caller's span or as a new, sampled trace."""
    if _begin is None:
        return NO_SPAN
    return _begin(name, parent, attributes, True, 0.0)


def begin_root_span(name: str, **attributes: Attribute) -> Span:
    """Begins a new trace for work that no call has caused; NO_SPAN if it is not sampled."""
    if _begin is None:
        return NO_SPAN
    return _begin(name, None, attributes, False, 0.0)


def active_trace_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the trace headers of the user's current span if the process uses OpenTelemetry; else empty."""
    # A caller that is inside a span has imported OpenTelemetry.
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 - only where the user has it
        TraceContextTextMapPropagator,
    )

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
