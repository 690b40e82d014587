"""Scrapes are answered from threads of their own: whatever the loop does, and only under their path."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
import urllib.request

import pytest

from blockyard.service.metrics import READY, Registry
from blockyard.service.metrics_server import MetricsServer
from blockyard.service.servers import PortTaken
from tests.kit.processes.scrape import Scrape


@pytest.fixture
def registry() -> Registry:
    made = Registry("test", ())
    made.read(READY, lambda: 1)
    return made


async def test_it_answers_while_the_loop_stands_still(registry: Registry) -> None:
    server = MetricsServer(registry)
    port = server.start("127.0.0.1", 0)
    try:
        # Asked by the loop's own thread, which does nothing else until it has the answer.
        assert Scrape.get(f"127.0.0.1:{port}").sum("blockyard_ready") == 1
    finally:
        server.stop()


def test_what_else_is_asked_for_is_not_found(registry: Registry) -> None:
    server = MetricsServer(registry)
    port = server.start("127.0.0.1", 0)
    try:
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
        assert raised.value.code == 404
        raised.value.close()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", "/metrics?name=a", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        response = connection.getresponse()
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert response.read().endswith(b"# EOF\n")
        connection.close()
        connection.request("POST", "/metrics")
        assert connection.getresponse().status == 501
        connection.close()
    finally:
        server.stop()


def test_a_scraper_that_says_nothing_or_hangs_up_holds_nobody_up(
    registry: Registry, capsys: pytest.CaptureFixture[str]
) -> None:
    server = MetricsServer(registry)
    port = server.start("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as rude:
            rude.sendall(b"nonsense\r\n\r\n")
            assert Scrape.get(f"127.0.0.1:{port}").sum("blockyard_ready") == 1
    finally:
        server.stop()
    assert capsys.readouterr().err == ""


def test_a_scrape_that_fails_is_in_the_log_and_the_next_one_is_answered(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = MetricsServer(registry)
    port = server.start("127.0.0.1", 0)
    try:
        with monkeypatch.context() as broken:
            broken.setattr(Registry, "encode", lambda self, accept: 1 / 0)
            with pytest.raises(http.client.RemoteDisconnected):
                Scrape.get(f"127.0.0.1:{port}")
        assert Scrape.get(f"127.0.0.1:{port}").sum("blockyard_ready") == 1
    finally:
        server.stop()
    assert "a scrape failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_a_taken_port_is_told_and_a_stopped_one_is_free(registry: Registry) -> None:
    server = MetricsServer(registry)
    port = server.start("127.0.0.1", 0)
    with pytest.raises(PortTaken, match=str(port)):
        MetricsServer(registry).start("127.0.0.1", port)
    server.stop()
    again = MetricsServer(registry)
    assert again.start("127.0.0.1", port) == port
    again.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "metrics"]


def test_it_listens_on_addresses_of_version_6(registry: Registry) -> None:
    server = MetricsServer(registry)
    port = server.start("[::1]", 0)
    try:
        assert Scrape.get(f"[::1]:{port}").sum("blockyard_ready") == 1
    finally:
        server.stop()


def test_one_that_was_not_started_stops(registry: Registry) -> None:
    MetricsServer(registry).stop()
