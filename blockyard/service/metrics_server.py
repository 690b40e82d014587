"""Serves /metrics on its own port and threads, so that a busy event loop cannot delay it."""

from __future__ import annotations

import functools
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from blockyard.service.roots import make_thread
from blockyard.service.servers import PortTaken
from blockyard.telemetry import EventLogger

if TYPE_CHECKING:
    from blockyard.service.metrics import Registry

log = EventLogger(__name__)

PATH = "/metrics"
# A client that takes longer to send its request is disconnected.
_REQUEST_SECONDS = 5.0
# How long the thread waits for a connection before it checks for a stop.
_IDLE_SECONDS = 30.0


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    registry: Registry

    def do_GET(self) -> None:
        """Answers /metrics; every other path is 404."""
        if urlsplit(self.path).path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content, content_type = self.registry.encode(self.headers.get("Accept", ""))
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: scrapes come every few seconds."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    timeout = _IDLE_SECONDS

    def server_bind(self) -> None:
        """Binds the port without HTTPServer's lookup of the host name."""
        TCPServer.server_bind(self)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an exception, except a scraper's disconnect."""
        if not isinstance(sys.exception(), OSError):
            log.exception("a scrape failed")


class MetricsServer:
    """`/metrics` of a registry: `start`, then `stop`."""

    def __init__(self, registry: Registry) -> None:
        self._handler = type("Handler", (_Handler,), {"registry": registry})
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def start(self, host: str, port: int) -> int:
        """Listens (port 0: a free one) and returns the port; raises PortTaken."""
        host = host.strip("[]")
        server = type("Server", (_Server,), {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET})
        try:
            self._server = server((host, port), self._handler)
        except OSError as error:
            raise PortTaken(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from None
        self._thread = make_thread(functools.partial(self._serve, self._server), "metrics")
        self._thread.start()
        return self._server.server_address[1]

    def _serve(self, server: _Server) -> None:
        while not self._stopping.is_set():
            server.handle_request()

    def stop(self) -> None:
        """Stops answering and waits until the port is free. Does nothing before `start`."""
        if self._server is None or self._thread is None:
            return
        self._stopping.set()
        # Wake the serving thread.
        self._server.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.server_close()
