"""The trace context that calls carry, in W3C Trace Context's form."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

# Level 1 of W3C Trace Context. Later versions may append fields after the flags.
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,64})?", re.ASCII
)
_MAX_TRACESTATE = 512


class TraceContext(NamedTuple):
    """The parent of later spans. `tracestate` is passed on unread."""

    traceparent: str
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """The trace's id: 32 hexadecimal digits."""
        return self.traceparent[3:35]


def read_trace_context(headers: Iterable[tuple[str | bytes, str | bytes]]) -> TraceContext | None:
    """Reads the caller's span from headers or gRPC metadata; None if it is missing or malformed."""
    found = {name: _text(value) for key, value in headers if (name := _text(key).lower()) in TraceContext._fields}
    traceparent, tracestate = found.get("traceparent", "").strip(), found.get("tracestate", "").strip()
    if not _TRACEPARENT.fullmatch(traceparent):
        return None
    return TraceContext(traceparent, tracestate if len(tracestate) <= _MAX_TRACESTATE else "")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")
