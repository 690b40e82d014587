"""An OpenTelemetry collector in miniature: takes spans by OTLP, over gRPC and over HTTP, and keeps them in memory."""

from __future__ import annotations

import gzip
import threading
import time
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.kit.processes.spans import Seen, SeenSpan, without_prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SECONDS = 30.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens while its `with` block runs.

    Attributes:
        grpc_endpoint, http_endpoint: where it takes spans, as URLs.
    """

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._changed = threading.Condition()
        self._grpc = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._grpc)
        self.grpc_endpoint = f"http://127.0.0.1:{self._grpc.add_insecure_port('127.0.0.1:0')}"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.http_endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Self:
        self._grpc.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._grpc.stop(grace=0).wait()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def Export(self, request: Any, context: Any) -> Any:
        """Takes spans."""
        self.take(request)
        return trace_service_pb2.ExportTraceServiceResponse()

    def take(self, request: trace_service_pb2.ExportTraceServiceRequest) -> None:
        """Keeps the spans of one message."""
        with self._changed:
            self._spans.extend(_spans(request))
            self._changed.notify_all()

    @property
    def seen(self) -> Seen:
        """All spans that have come."""
        with self._changed:
            return Seen(self._spans)

    def wait_until(self, condition: Callable[[Seen], Any], seconds: float = _SECONDS) -> Seen:
        """Waits until what has come fulfils a condition; fails with all of it when it does not in time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not condition(seen := Seen(self._spans)):
                told = [(span.service, span.name, span.trace_id[:4], span.attributes) for span in seen.spans]
                assert self._changed.wait(deadline - time.monotonic()), told
            return seen


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            known = self.path == "/v1/traces"
            if known:
                collector.take(trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if known else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    return Handler


def _spans(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[SeenSpan]:
    for resource_spans in request.resource_spans:
        service = dict(_attributes(resource_spans.resource.attributes))["service.name"]
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield SeenSpan(
                    service=service,
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_seconds=span.start_time_unix_nano / 1e9,
                    end_seconds=span.end_time_unix_nano / 1e9,
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    attributes=without_prefix(_attributes(span.attributes)),
                    events=tuple(event.name for event in span.events),
                    error=span.status.message,
                )


def _attributes(attributes: Any) -> Iterator[tuple[str, Any]]:
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        yield each.key, tuple(item.string_value for item in value.values) if kind == "array_value" else value
