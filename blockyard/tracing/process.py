"""Starts and stops the tracing of a service's process, by its settings or by OpenTelemetry's own variables."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockyard.telemetry import EventLogger
from blockyard.tracing.spans import ENDPOINT_VARIABLES, use_tracer

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from blockyard.configuration import TracingSettings
    from blockyard.tracing.export import OtlpTracer

log = EventLogger(__name__)

_STOP_SECONDS = 2.0
_tracer: OtlpTracer | None = None


class TracingUnavailable(Exception):
    """Tracing was asked for, but its packages are not installed."""


def start_tracing(service: str, settings: TracingSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Starts tracing if the settings or OpenTelemetry's own variables name an endpoint.

    Raises TracingUnavailable if the settings name an endpoint and OpenTelemetry is not installed. If only the variables
    do, which a platform may set for every process, it logs a warning.
    """
    global _tracer
    if not (settings.trace_endpoint or _is_in(environment)):
        return
    try:
        from blockyard.tracing.export import make_tracer  # noqa: PLC0415 - an optional feature
    except ImportError as error:
        message = f"traces need packages that are not installed ({error}): pip install 'blockyard[tracing]'"
        if settings.trace_endpoint:
            raise TracingUnavailable(message) from None
        log.warning(message)
        return
    _tracer = make_tracer(service, settings, environment)
    use_tracer(_tracer.begin, every_step=settings.trace_every_step)


def _is_in(environment: Mapping[str, str]) -> bool:
    is_off = (
        environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none"
    )
    return not is_off and any(environment.get(variable) for variable in ENDPOINT_VARIABLES)


def stop_tracing(seconds: float = _STOP_SECONDS) -> None:
    global _tracer
    tracer, _tracer = _tracer, None
    use_tracer(None)
    if tracer is not None:
        tracer.stop(seconds)


@contextmanager
def traced_process(service: str, settings: TracingSettings) -> Generator[None]:
    """Traces, if configured, while the context is open; raises the errors of `start_tracing`."""
    start_tracing(service, settings)
    try:
        yield
    finally:
        stop_tracing()
