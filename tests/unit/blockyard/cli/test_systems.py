"""`ps`, `stop`, `down` and `logs`, over systems that stand-ins list."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from blockyard.local.user_folders import logs_folder
from tests.unit.blockyard.cli.invoking import run
from tests.unit.blockyard.local.test_registry import make_entry, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

Captured = pytest.CaptureFixture[str]
SLEEPER = "import signal; signal.sigwait([signal.SIGINT])"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process that is listed as a system of this name."""
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: str = "up") -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", SLEEPER])
        running.append(process)
        log = str(logs_folder() / f"{name}.log") if command == "up" else ""
        started = psutil.Process(process.pid).create_time()
        write(make_entry(name, pid=process.pid, started=started, command=command, log=log))
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_without_systems(capsys: Captured) -> None:
    assert run("ps") == 0
    assert capsys.readouterr() == ("", "no system runs here: `blockyard up` starts one\n")
    assert run("ps", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    for command in ("stop", "down", "logs"):
        assert run(command) == 1
        assert capsys.readouterr().err == "error: no such system runs here: see `blockyard ps`\n"


def test_ps_lists_systems(start: Callable[..., subprocess.Popen[bytes]], capsys: Captured) -> None:
    process = start("one")
    assert run("ps") == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["name", "model", "state", "http", "pid", "up", "by"]
    assert row.split()[:5] == ["one", "demo", "starting", "http://127.0.0.1:2", str(process.pid)]


@pytest.mark.parametrize("arguments", [["stop", "one"], ["stop"], ["down"], ["down", "--all"], ["stop", "--now"]])
def test_a_system_is_stopped(
    start: Callable[..., subprocess.Popen[bytes]], arguments: list[str], capsys: Captured
) -> None:
    process = start("one")
    assert run(*arguments) == 0
    assert capsys.readouterr().out == "stopped one\n"
    assert process.wait(10) == -15


def test_which_one_is_asked(start: Callable[..., subprocess.Popen[bytes]], capsys: Captured) -> None:
    processes = [start("one"), start("two"), start("front", "serve")]
    assert run("stop") == 1
    assert capsys.readouterr().err == "error: several run here, say which: one, two, front\n"
    assert run("down", "front") == 1
    assert "started by `blockyard serve`: see `blockyard stop`" in capsys.readouterr().err
    assert run("stop", "nobody") == 1
    assert "no system nobody runs here: there are one, two, front" in capsys.readouterr().err
    assert [process.poll() for process in processes] == [None] * 3


def test_logs_shows_the_end(start: Callable[..., subprocess.Popen[bytes]], capsys: Captured) -> None:
    start("one")
    (logs_folder() / "one.log").write_text("".join(f"{number}\n" for number in range(200)))
    assert run("logs", "-n", "2") == 0
    assert capsys.readouterr().out == "198\n199\n"
    assert run("logs", "one") == 0
    assert capsys.readouterr().out.startswith("100\n")
    for name in ("two", "../one"):
        assert run("logs", name) == 1
        assert f"there is no log of {name}; there are: one" in capsys.readouterr().err


def test_logs_follows_to_the_end(start: Callable[..., subprocess.Popen[bytes]], capsys: Captured) -> None:
    process = start("one")
    (logs_folder() / "one.log").write_text("last\n")
    process.terminate()
    process.wait()
    assert run("logs", "one", "--follow") == 0
    assert capsys.readouterr().out == "last\n"


def test_up_refuses_a_model_before_it_starts_anything(capsys: Captured) -> None:
    assert run("up", "/nowhere/at/all") == 1
    assert capsys.readouterr().err.startswith("error: MODEL_NOT_LOADED: /nowhere/at/all is no folder")
    assert list(logs_folder().iterdir()) == []
