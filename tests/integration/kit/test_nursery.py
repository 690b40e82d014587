"""Processes that are forked from one with all imports, as tests see them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.kit.processes.nursery import ROOT, Child, run_command

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


def test_a_command_writes_to_two_outputs() -> None:
    done = run_command(["nonsense"], os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense" in done.stderr


OTHER = """
import os, time
from tests.kit.processes.nursery import Child
child = Child("gateway", ["--scheduler-address", "unix:/nobody", "--http-port=0", "--grpc-port=0"], os.environ, 1)
print("pid", child.pid, flush=True)
time.sleep(100)
"""


def test_processes_share_it_and_their_children_end_with_them(tmp_path: Path) -> None:
    ours = start(tmp_path, "--scheduler-address", f"unix:{tmp_path}/nobody", "--http-port", "0", "--grpc-port", "0")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", OTHER], env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        pid = int(next(line for line in other.stdout if line.startswith("pid")).split()[1])
        with open(f"/proc/{ours.pid}/stat") as mine, open(f"/proc/{pid}/stat") as its:
            assert mine.read().split()[3] == its.read().split()[3], "they have the same parent"
        descriptor = os.pidfd_open(pid)
        other.kill()
    # Readable when the child has ended.
    with open(descriptor, "rb"):
        assert select.select([descriptor], [], [], 60)[0]
    assert ours.poll() is None
    ours.kill()
