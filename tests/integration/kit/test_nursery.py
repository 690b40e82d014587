"""Processes that are forked from one with all imports, as tests see them."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes.nursery import Child

if TYPE_CHECKING:
    from pathlib import Path


def start(tmp_path: Path, *flags: str, **environment: str) -> Child:
    with (tmp_path / "log").open("wb") as log:
        return Child("gateway", flags, {**os.environ, **environment}, log.fileno())


@pytest.mark.parametrize(
    ("flags", "code", "told"), [(["--help"], 0, "usage: gateway"), (["--nonsense"], 2, "nonsense")]
)
def test_a_child_is_the_program_that_was_asked_for(flags: list[str], code: int, told: str, tmp_path: Path) -> None:
    child = start(tmp_path, *flags)
    assert child.wait(60) == child.poll() == code
    assert told in (tmp_path / "log").read_text()


def test_a_child_has_an_environment_of_its_own(tmp_path: Path) -> None:
    assert start(tmp_path, "--print-config", BLOCKYARD_HTTP_PORT="12345").wait(60) == 0
    assert "12345" in (tmp_path / "log").read_text()
    assert start(tmp_path, "--print-config").wait(60) == 0
    assert "12345" not in (tmp_path / "log").read_text()


def test_a_child_is_waited_for_and_killed(tmp_path: Path) -> None:
    child = start(tmp_path, "--scheduler-address", f"unix:{tmp_path}/nobody", "--http-port", "0", "--grpc-port", "0")
    child.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    assert child.poll() is None
    child.kill()
    assert child.wait(60) == -signal.SIGKILL
    # One that is gone heeds nothing.
    child.terminate()
