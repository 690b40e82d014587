"""`blockyard serve` with its services as processes, which a fake gateway stands in for."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.unit.blockyard.cli.invoking import run

if TYPE_CHECKING:
    from pathlib import Path

Captured = pytest.CaptureFixture[str]


def when_written(captured: Captured, pattern: str, act: Any) -> threading.Thread:
    """Acts as soon as the output so far matches. There is no event of another thread's output but polling it."""

    def watch() -> None:
        seen, deadline = "", time.monotonic() + 60
        while not re.search(pattern, seen) and time.monotonic() < deadline:
            seen += captured.readouterr().out
            time.sleep(0.02)
        written.append(seen)
        act()

    written: list[str] = []
    thread = threading.Thread(target=watch)
    thread.written = written  # type: ignore[attr-defined]
    thread.start()
    return thread


FREE_PORTS = ("--http-port=0", "--grpc-port=0", "--admin-port=0")


def test_serve_tells_where_it_is_and_ends_on_a_signal(fake_services: Path, capfd: Captured) -> None:
    thread = when_written(capfd, "(?s)ready.*python -c", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run("serve", *FREE_PORTS) == 0
    thread.join()
    (out,) = thread.written  # type: ignore[attr-defined]
    assert "ready: fake, up to 64 tokens" in out
    address = r"127\.0\.0\.1:\d+"
    assert re.search(rf"page   http://{address}/\n  gRPC   {address}\n  HTTP   http://{address}/v1\n", out)
    assert re.search(rf"  metrics http://{address}/metrics\n", out)
    for name in ("scheduler", "worker-0"):
        assert re.search(rf"  http://{address}/metrics \({name}\)\n", out)
    assert re.search(rf"blockyard generate 'def read_lines\(path\):' --target {address}\n", out)
    assert re.search(r"curl http://127\.0\.0\.1:\d+/v1/completions -H .* -d '\{\"model\": \"fake\"", out)
    assert re.search(r"python -c 'import blockyard; ", out)
    assert "once more to stop at once" in capfd.readouterr().err


def test_serve_suggests_a_chat_to_a_model_that_chats(fake_services: Path, capfd: Captured) -> None:
    stand_in = fake_services / "stand_in_gateway.py"
    stand_in.write_text(stand_in.read_text().replace("FakeGateway(", "FakeGateway(has_chat_template=True, "))
    thread = when_written(capfd, "(?s)ready.*python -c", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run("serve", "--no-enable-page", *FREE_PORTS) == 0
    thread.join()
    (out,) = thread.written  # type: ignore[attr-defined]
    assert "page " not in out
    assert re.search(r"blockyard chat --target 127\.0\.0\.1:\d+\n", out)
    (body,) = re.findall(r"/v1/chat/completions .* -d '(.*)'", out)
    assert json.loads(body)["messages"][0]["role"] == "user"
    assert "generate" not in out


def test_serve_tells_what_callers_need(fake_services: Path, capfd: Captured) -> None:
    thread = when_written(capfd, "(?s)ready.*security", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run("serve", "--api-keys-file=k", "--tls-certificate=c", "--tls-key=k", *FREE_PORTS) == 0
    thread.join()
    (out,) = thread.written  # type: ignore[attr-defined]
    assert re.search(r"HTTP   https://127\.0\.0\.1:\d+/v1", out)
    assert "callers need a key and TLS" in out
    assert "curl" not in out, "it would not work like that"


def test_a_log_for_machines_has_the_commands_lines_in_its_form(fake_services: Path, capfd: Captured) -> None:
    thread = when_written(capfd, "(?s)ready.*python -c", lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run("serve", "--log-format=json", *FREE_PORTS) == 0
    thread.join()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "once more to stop at once" in line]
    assert json.loads(line)["service"] == "serve"


def test_serve_fails_with_a_service_that_cannot_start(fake_services: Path, capfd: Captured) -> None:
    (fake_services / "stand_in_gateway.py").write_text("print('no weights'); raise SystemExit(9)")
    assert run("serve", *FREE_PORTS) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "error: the gateway ended with 9 before it was ready:\n    no weights\n" in err
