"""A process that is ours tells gRPC how to read sockets before it is used; a client's never does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from blockyard.service import grpc_environment

NAMES = ("GRPC_EXPERIMENTS", "GRPC_VERBOSITY")
TELL = "import os, sys; print('grpc' in sys.modules, *(os.environ.get(name) for name in {names}))"


def ask(code: str, **environment: str) -> list[str]:
    """What a process says that begins with this code: whether gRPC was imported, and the two variables."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    command = [sys.executable, "-c", f"{code}; {TELL.format(names=NAMES)}"]
    return subprocess.run(command, env=clean | environment, check=True, capture_output=True, text=True).stdout.split()


def test_it_is_told_without_importing_grpc() -> None:
    told = ask("from blockyard.service import grpc_environment; grpc_environment.prepare()")
    assert told == ["False", "-event_engine_client,-event_engine_listener", "NONE"]


def test_what_the_environment_says_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    grpc_environment.prepare()
    assert [os.environ[name] for name in NAMES] == ["", "DEBUG"]


@pytest.mark.parametrize("module", ["gateway.__main__", "scheduler_service.__main__"])
def test_a_service_tells_it(module: str) -> None:
    assert ask(f"import {module}") == ["True", "-event_engine_client,-event_engine_listener", "NONE"]


def test_the_program_tells_it() -> None:
    told = ask("import blockyard.cli.main as program; program.app = lambda *_, **__: None; program.main([])")
    assert told[-3:] == ["True", "-event_engine_client,-event_engine_listener", "NONE"]


def test_a_client_leaves_its_process_alone() -> None:
    assert ask("import blockyard; blockyard.Client('127.0.0.1:1').close()") == ["True", "None", "None"]
