"""Encodes and decodes trace contexts."""

from __future__ import annotations

from blockyard.common.v1 import trace_pb2
from blockyard.contract.trace import TraceContext, read_trace_context


def encode_trace_context(context: TraceContext | None) -> trace_pb2.TraceContext | None:
    """Writes a context; None for none, which a constructor takes for an absent field."""
    if context is None:
        return None
    return trace_pb2.TraceContext(traceparent=context.traceparent, tracestate=context.tracestate)


def decode_trace_context(message: trace_pb2.TraceContext) -> TraceContext | None:
    """Reads one; None for an absent field, and for what is no context."""
    if not message.traceparent:
        return None
    return read_trace_context([("traceparent", message.traceparent), ("tracestate", message.tracestate)])
